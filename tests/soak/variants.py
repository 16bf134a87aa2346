"""The runs that are killed: settings, processes, and what is killed how often."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GROUPS, MEMBERS = 4, 4  # of a step of the tiny run (tests/end_to_end/tiny.py)
DENSE = (
  '--config.arm=dense',
  '--config.cache.budget=None',
  '--config.quant.sampler=none',
  '--config.ledger.every=None',
  '--config.loss.kl_coef=0.0',
  '--config.optimizer.minibatches=1',
)
# With the chat template a prompt has up to 32 tokens.
CHAT = '--config.task.chat=True', '--config.sampling.max_prompt=40', '--config.sampling.prompt_buckets=(40,)'
APART = '--config.devices.learner=0', '--config.devices.rollout=1'
WHOLE: Mapping[str, float] = MappingProxyType({'run': 1, 'main': 1})
ONE_OF_TWO: Mapping[str, float] = MappingProxyType({'run': 1, 'process': 2})
WORKERS: Mapping[str, float] = MappingProxyType({'run': 1, 'main': 1, 'worker': 8})
FEW_WORKERS: Mapping[str, float] = MappingProxyType({'run': 2, 'main': 2, 'worker': 1})
ONE_OF_TWO_FEW_WORKERS: Mapping[str, float] = MappingProxyType({'run': 2, 'process': 4, 'worker': 1})
RENDERERS: Mapping[str, float] = MappingProxyType({'run': 1, 'main': 1, 'renderer': 8})


@dataclass(frozen=True)
class Variant:
  """A run of the tiny model.

  Kinds of kills: `run` kills all processes of the run at once, and then its helpers (starts.py); `main` kills the processes of
  the run, and the helpers must end; `process` kills one of several processes, and the others must end by themselves; `worker` and
  `renderer` kill a helper, a grading worker or the renderer of chat templates, and the run must go on.
  """

  name: str
  flags: tuple[str, ...]
  steps: int = 6
  processes: int = 1
  devices: int = 1  # of each process
  repeatable: bool = True  # whether an interrupted run must equal an uninterrupted one bit for bit
  kinds: Mapping[str, float] = WHOLE  # kind of a kill -> relative frequency

  @property
  def exports(self) -> bool:
    return '--config.export=True' in self.flags

  @property
  def arguments(self) -> tuple[str, ...]:
    # A busy machine must not cost a grade.
    return (f'--config.steps={self.steps}', '--config.task.time_limit=120', *self.flags)


VARIANTS = {
  variant.name: variant
  for variant in (
    Variant('dense', DENSE),
    Variant('sparse_fp8', ('--config.export=True',)),  # with the ledger every second step
    Variant('workers', (*DENSE, '--config.task.workers=2'), kinds=WORKERS),
    Variant('chat', (*DENSE, *CHAT), kinds=RENDERERS),
    Variant(
      'async',
      ('--config.rollout.async_ratio=2.0', '--config.sampling.rows=8', '--config.export=True'),
      steps=8,
      repeatable=False,
      kinds=FEW_WORKERS,
    ),
    Variant('async_apart', (*DENSE, *APART, '--config.rollout.async_ratio=1.0'), steps=8, devices=2, repeatable=False),
    Variant('two_processes', (*DENSE, '--config.export=True'), processes=2, kinds=ONE_OF_TWO_FEW_WORKERS),
    Variant('two_processes_sparse_fp8', (), processes=2, kinds=ONE_OF_TWO),  # with the ledger every second step
    Variant(
      'two_processes_async',
      (*DENSE, '--config.rollout.async_ratio=1.0', '--config.sampling.rows=8'),
      processes=2,
      repeatable=False,
      kinds=ONE_OF_TWO,
    ),
  )
}
