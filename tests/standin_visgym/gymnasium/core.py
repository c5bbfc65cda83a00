"""What tells VisGym's fork from Gymnasium itself."""


class VLMEnvMixin:
    pass
