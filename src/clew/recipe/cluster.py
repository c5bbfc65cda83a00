"""The table of a recipe that says what a Kubernetes cluster gives the run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from clew.recipe.values import Allowed, Positive, Table

# Patterns are pydantic's, whose $ is the end of the text. 35: KubeRay and Kubernetes append up to 28 characters.
_NAME = Field(pattern=r"^[a-z]([a-z0-9-]{0,33}[a-z0-9])?$")
_LABEL = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
_IMAGE = Field(pattern=r"^[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9._-]+)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?$")
_NAME_WORDS = Allowed("at most 35 of a-z, 0-9 and -, beginning with a letter")
_LABEL_WORDS = Allowed("at most 63 of a-z, 0-9 and -")
_IMAGE_WORDS = Allowed("a container image, host/name:tag")
_INSTANCE = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9-]+)+$")
_INSTANCE_WORDS = Allowed("an instance type, e.g. ml.g7e.12xlarge")

Label = Annotated[str, _LABEL, _LABEL_WORDS]
OptionalLabel = Annotated[str | None, _LABEL, _LABEL_WORDS]
OptionalImage = Annotated[str | None, _IMAGE, _IMAGE_WORDS]
OptionalInstance = Annotated[str | None, _INSTANCE, _INSTANCE_WORDS]
FileSystem = Annotated[str | None, Field(pattern=r"^fs-[0-9a-f]{8,17}$"), Allowed("an id, fs-...")]
MountName = Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_-]{1,8}$"), Allowed("at most 8 letters, digits, _ and -")]
Subnet = Annotated[str | None, Field(pattern=r"^subnet-[0-9a-f]{8,17}$"), Allowed("an id, subnet-...")]
SecurityGroup = Annotated[str | None, Field(pattern=r"^sg-[0-9a-f]{8,17}$"), Allowed("an id, sg-...")]
Region = Annotated[str | None, Field(pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$"), Allowed("a region, e.g. us-west-2")]
Adapters = Annotated[
    str | None,
    Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9][A-Za-z0-9._-]*)+/?$"),
    Allowed("s3://bucket/prefix"),
]


class ClusterTable(Table):
    """What a Kubernetes cluster (HyperPod's EKS) gives the run: `clew cluster render` writes it into manifests."""

    name: Annotated[str | None, _NAME, _NAME_WORDS] = None
    """Name of the Ray cluster; left out: the recipe's."""
    namespace: Label = "default"
    """Namespace that everything is put into."""
    image: OptionalImage = None
    """Container image with Clew, as image/build.sh prints it; left out: to be set before anything starts."""
    serve_image: OptionalImage = None
    """Container image for serving, as image/build.sh prints it; left out: to be set before it is served."""
    head_instance: OptionalInstance = None
    """Instance type of the head; left out: any machine."""
    head_cpus: Positive = 4
    """CPUs of the head: the driver runs there, and no worker."""
    head_memory_gib: Positive = 16
    """Memory of the head, in GiB."""
    worker_instance: OptionalInstance = None
    """Instance type of the workers; left out: any machine with the GPUs."""
    worker_cpus: Positive = 8
    """CPUs of one worker machine."""
    worker_memory_gib: Positive = 64
    """Memory of one worker machine, in GiB."""
    shm_gib: Positive = 16
    """Part of that memory for /dev/shm (Ray's object store, NCCL, vLLM), in GiB."""
    claim: Label = "fsx-claim"
    """PersistentVolumeClaim of the shared file system, mounted at runtime.shared_dir."""
    storage_gib: Positive = 1200
    """Size of the shared file system, in GiB: 1200, or a multiple of 2400."""
    file_system: FileSystem = None
    """FSx for Lustre file system that exists; left out: one is made."""
    mount_name: MountName = None
    """Mount name of that file system."""
    subnet: Subnet = None
    """Subnet that a new file system is put into: one of the workers', so that traffic stays in their zone."""
    security_group: SecurityGroup = None
    """Security group of a new file system; it has to let the machines in on ports 988 and 1018-1023."""
    region: Region = None
    """AWS region of the cluster."""
    service_account: Label = "clew"
    """Kubernetes service account of all pods; EKS Pod Identity gives it its AWS rights."""
    queue: OptionalLabel = None
    """Local queue of Kueue, where HyperPod task governance is on; left out: no queue."""
    access: Literal["private", "public"] = "private"
    """Who reaches dashboard and jobs from outside: who made the cluster, or all who may connect in the namespace."""
    adapters: Adapters = None
    """S3 prefix that served adapters are loaded from; left out: to be set before it is served."""
