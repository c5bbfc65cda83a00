"""How a command ends when it does not end well: the user's to mend, or stopped by the user."""


class UserError(Exception):
    """Bad input: one clear line that names the key or file and the remedy. The CLI exits with code 2."""


class StorageError(UserError):
    """A place can't be written (full, read-only, gone): worth another try after a while."""


class RunFailed(Exception):
    """The machines under a run failed (a worker died); what was saved is whole. The CLI exits with code 1."""


class Interrupted(Exception):
    """The user asked to stop; everything up to ``step`` is saved. The CLI exits with code 130."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
