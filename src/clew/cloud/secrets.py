"""What must not leave this machine: names of files that hold secrets, and the shapes of secrets themselves."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

SECRET_FILES = (
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    "*.ovpn",
    "*.kubeconfig",
    "kubeconfig*",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "*credentials*",
    "*secret*",
    "*password*",
    "token",
    "token.*",
    "*.token",
    "*[-_]token",
    "*[-_]token.*",
    "*[-_]tokens.*",
    "htpasswd",
    "service-account*.json",
    "service_account*.json",
)
"""Patterns of names, in small letters; names that begin with a dot (.env, .netrc, .aws) are never sent anyway."""
_SHAPES = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
    re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"),  # AWS
    re.compile(r"(?i:secret_?access_?key)\W{1,5}[A-Za-z0-9/+]{40}"),
    re.compile(r"\bhf_[A-Za-z0-9]{30,}"),  # Hugging Face
    re.compile(r"\bsk-[A-Za-z0-9_-]{24,}"),  # OpenAI and others
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_\w{40}"),  # GitHub
    re.compile(r"\bglpat-[A-Za-z0-9_-]{20}"),  # GitLab
    re.compile(r"\bAIza[A-Za-z0-9_-]{35}"),  # Google
    re.compile(r"\bxox[abpr]-[A-Za-z0-9-]{20,}"),  # Slack
    re.compile(r"\beyJ[A-Za-z0-9_-]{16,}\.eyJ[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),  # JSON Web Tokens
)
_KEYS = re.compile(r"(^|[_-])(token|secret|password|passwd|api_?key|access_?key|credentials?)($|[_-])", re.I)


def is_secret_file(name: str) -> bool:
    """Whether a file of this name is likely to hold a secret."""
    return any(fnmatchcase(name.lower(), pattern) for pattern in SECRET_FILES)


def holds_secret(text: str) -> bool:
    """Whether a text holds a private key or something of the shape of a known kind of token."""
    return any(shape.search(text) for shape in _SHAPES)


def is_secret_key(key: str) -> bool:
    """Whether a setting of this name is likely to hold a secret."""
    return _KEYS.search(key) is not None
