"""What the user sees of a run: live console progress, TensorBoard scalars, the HTML report, its cost."""
