"""The configuration tree, typed: what Hydra composes is merged into it, so unknown keys and wrong types fail.

The classes are not frozen, because OmegaConf refuses to override nested frozen ones; nobody mutates them.
"""

from dataclasses import dataclass, field

from data.config import DataConfig
from models.config import FlowConfig, ModelConfig


@dataclass
class RunConfig:
    name: str = "train"
    dir: str = ""  # empty: runs/NAME-DATE-TIME, resolved by the launcher


@dataclass
class BalancerConfig:
    layout: str = "elastic"  # none | elastic | a bag spec such as g1n2+g2n1
    domain: int = 8  # consecutive ranks that may share a sequence; usually the ranks of a node
    gamma: float = 0.49  # weight of the quadratic term in the work of a sequence (KnapFormer, eq. 1)
    # auto (this device's calibration of this model, else analytic) | analytic (gamma) | cluster (modelled
    # seconds of cluster=NAME, traffic included) | a file that `knapformer calibrate` wrote
    cost: str = "auto"
    kernel: str = "auto"  # auto | sdpa | varlen | flash2 | flash3 | flash4


@dataclass
class OptimizerConfig:
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0  # global gradient norm; 0 leaves gradients alone
    ema: float = 0.999  # decay of the averaged weights that sampling uses


@dataclass
class SchedulerConfig:
    warmup: int = 100  # steps of linear warm-up
    decay: str = "constant"  # constant | cosine | linear, after the warm-up
    final: float = 0.1  # share of the learning rate left at the last step
    steps: int | None = None  # length of warm-up and decay; unset: training.steps


@dataclass
class TrainingConfig:
    steps: int = 1000
    seed: int = 0
    batch_tokens: int = 8192  # tokens of a global batch, text included, over all ranks
    max_tokens_per_rank: int | None = None  # memory cap; the batch is cut into micro-steps to respect it
    caption_dropout: float = 0.1  # share of samples trained without words, for guidance
    flow: FlowConfig = field(default_factory=FlowConfig)


@dataclass
class ParallelConfig:
    dtype: str = "auto"  # of compute: auto (bfloat16 on GPUs, float32 on CPU) | float32 | bfloat16
    activation_checkpointing: bool = False
    compile: bool = False
    threads: int = 1  # CPU threads a rank

    def dtype_on(self, device: str) -> str:
        """The name of the dtype of compute on a kind of device: auto is bfloat16 on cuda, else float32."""
        return ("bfloat16" if device == "cuda" else "float32") if self.dtype == "auto" else self.dtype


@dataclass
class CheckpointConfig:
    every: int = 500  # steps; 0 saves at the end only
    resume: str = "auto"  # auto | none | path of a checkpoint
    keep: int = 2  # complete checkpoints kept; 0 keeps all


@dataclass
class SamplingConfig:
    every: int = 0  # steps between sample grids; 0 draws at the end only
    prompts: list[str] = field(default_factory=list)
    pictures: list[int] = field(default_factory=lambda: [256, 256])  # height, width
    clip_prompts: list[str] = field(default_factory=list)
    clips: list[int] = field(default_factory=lambda: [16, 256, 256])  # frames, height, width
    fps: float = 8.0
    steps: int = 25
    guidance: float = 2.0
    rows: int = 4  # drawings of each prompt


@dataclass
class LoggingConfig:
    every: int = 1
    lengths: bool = True  # lengths.jsonl, the lengths of each logged step, for `knapformer profile`
    wandb: str = "offline"  # offline | online | disabled
    project: str = "knapformer"
    group: str | None = None


@dataclass
class LaunchConfig:
    ranks: int | None = None  # processes on each machine; unset: one a GPU, or two on CPU
    nodes: int = 1  # machines
    restarts: int = 0  # how often all ranks start again after one failed, from the last checkpoint
    device: str = "auto"  # auto | cpu | cuda
    port: int = 0  # of the rendezvous; 0 takes a free one
    timeout: int = 600  # seconds a collective may take before the job ends
    straggler: float = 1.5  # ranks this many times slower than the median are reported; 0: never
    window: int = 50  # steps over which they are compared
    preflight: bool | None = None  # check all nodes before the first step; unset: on more than one machine
    peak_tflops: float | None = None  # of one device, for mfu; unset: known for common GPUs, else mfu is null

    @property
    def job_ranks(self) -> int:
        """Ranks of all machines together."""
        return self.nodes * (self.ranks or 1)


@dataclass
class ClusterConfig:
    """The machine that `profile` plans for; presets in conf/cluster, every number overridable."""

    name: str = "h100"
    node: int = 8  # ranks of a node
    peak_tflops: float = 989.0  # of one device, dense, in the dtype of compute
    memory_gib: float = 80.0  # of one device
    memory_bandwidth: float = 3350.0  # GB/s
    bandwidth: float = 200.0  # GB/s a rank sends inside a node
    bandwidth_across: float = 50.0  # GB/s a rank sends between nodes
    latency_us: float = 20.0  # of one collective without any bytes
    linear_efficiency: float = 0.285  # share of the peak that a block without its attention reaches
    attention_efficiency: float = 0.58  # share of the peak that attention reaches
    overlap: float = 0.9  # share of the gradient traffic that compute hides


@dataclass
class ProfileConfig:
    ranks: int = 32
    steps: int = 20
    layouts: list[str] = field(default_factory=list)  # beside none, all uniform ones and elastic
    uniform: bool = True  # plan every spec of equal bags
    tune: bool = False  # search the static specs as well
    run: str | None = None  # a run folder: its logged lengths and measured times
    lengths: str | None = None  # a CSV or JSONL file of lengths


@dataclass
class CalibrateConfig:
    folder: str = "calibrations"  # where fits are kept, a file for each device and model
    shortest: int = 64  # tokens of the shortest sequence measured; the others double
    longest: int | None = None  # tokens of the longest; unset: until a step takes `patience`
    patience: float = 0.5  # seconds
    repeats: int = 7  # runs of each case that count


@dataclass
class SlurmConfig:
    """What the batch script asks Slurm for, on launch.nodes nodes; site defaults in conf/slurm."""

    gpus_per_node: int = 8  # a rank each; 0: launch.ranks ranks a node, on CPU
    cpus: int | None = None  # of a node; unset: what the site gives
    memory: str | None = None  # of a node, such as 500G; "0" is all of it
    time: str = "24:00:00"  # of one start
    grace: int = 300  # seconds before the end of the time at which ranks are told to save
    requeues: int = 20  # how often a preempted job starts again
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    container: str | None = None  # an image for the pyxis plugin of Slurm
    mounts: list[str] = field(default_factory=list)  # FROM:TO, besides the run folder and the working folder
    python: str | None = None  # unset: the one that submits; in a container, `python`
    env: dict[str, str] = field(default_factory=dict)  # for all ranks
    setup: list[str] = field(default_factory=list)  # lines of shell before it all, such as module load cuda
    options: list[str] = field(default_factory=list)  # more for sbatch, such as --exclusive


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
