"""The plan of a run: sequences that fit, kinds of rollouts, the evaluation, refusals, and the command."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from plans import FEW, LAYER, MIXTURE, MODELS, ROOT, RUN, D, E, F, H, K, V, shallow

from sprl.config import (
  Cache,
  Devices,
  Evaluation,
  HeldOutSet,
  Lora,
  Loss,
  Mesh,
  Meshes,
  ModelSettings,
  Optimizer,
  Packing,
  Quant,
  Rollout,
  Sampling,
  SettingsError,
  default_config,
)  # fmt: skip
from sprl.config_reader import resolve
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.planning import aot, compile_check
from sprl.planning.devices import device
from sprl.planning.estimate import on, plan
from sprl.planning.memory import sampler_weight_bytes, size
from sprl.planning.mesh_axes import MeshAxes
from sprl.planning.remat import with_remat
from sprl.planning.show import as_json, as_text
from sprl.sharding.mesh import filled

H200 = device('h200')
ONE = MeshAxes()


@pytest.fixture(scope='module')
def whole():
  """The plan of a run on one device."""
  return plan(FEW, RUN, ONE, ONE, H200)


def test_planned_rows_are_the_most_that_fit():
  planned = plan(FEW, RUN, MeshAxes(fsdp=8), MeshAxes(data=8), H200)
  for kind in planned.kinds:
    filled = [planned.update.state + kind.memory.total(rows) for rows in (kind.most_rows, kind.most_rows + 1)]
    assert filled[0] <= planned.usable < filled[1]
  dense, dense8, sparse, sparse8 = (kind.most_rows for kind in planned.kinds)
  assert dense < dense8 < sparse < sparse8
  assert [kind.rows for kind in planned.kinds] == [8] * 4  # of 64 sequences, on 8 devices


def test_sequences_that_fit_are_shown_beside_those_that_the_config_asks_for(whole):
  kind = dataclasses.replace(whole.kinds[0], asked=1024, rows=334)
  assert ' 334 of 1,024 ' in as_text(dataclasses.replace(whole, kinds=(kind,)))
  assert ' of ' not in as_text(whole).partition('asked')[2].splitlines()[1]


def test_a_plan_names_the_parts_that_do_not_fit():
  planned = plan(FEW, RUN, ONE, ONE, device('v5e'))
  assert not planned.fits['update']
  assert all(kind.most_rows < 0 and kind.rows == 0 for kind in planned.kinds)
  assert ' too much' in as_text(planned)


def test_offloaded_moments_leave_room_for_sequences(whole):
  offloaded = plan(FEW, dataclasses.replace(RUN, optimizer=Optimizer(offload=True)), ONE, ONE, H200)
  assert f"{offloaded.update.host / 2**30:.2f} GiB of moments in the host's memory" in as_text(offloaded)
  assert "host's memory" not in as_text(whole)
  assert as_json(offloaded)['update']['host'] == offloaded.update.host > 0
  assert all(b.most_rows > a.most_rows for a, b in zip(whole.kinds, offloaded.kinds))


# --- the evaluation --------------------------------------------------------------------------------------------------


def test_an_evaluation_by_hand():
  """The evaluation is dense and unquantised by default; it may not fit where sparse FP8 rollouts fit."""
  run = dataclasses.replace(
    RUN,
    sampling=Sampling(max_prompt=512, max_tokens=4096, rows=256),
    rollout=Rollout(prompts=32, group=8),
    packing=Packing(row_tokens=4608, rows=1),
    quant=Quant(sampler='w8a8_kv8'),
    loss=Loss(kl_coef=1e-3),
  )
  planned = plan(FEW, run, MeshAxes(fsdp=4), MeshAxes(data=4), device('h100', memory=17e9))
  found, parameters = planned.evaluation, size(transformer.abstract_params(FEW))
  assert (found.rows, found.rows_asked) == (32, 128)  # problems, one sample each
  assert planned.update.state == pytest.approx((4 + 8 + 2) * parameters / 4, rel=1e-3)
  drawn = 4 * (3 * 4096 + V)  # tokens, their log-probs, numbers of kept slots; logits
  prefill = 8 * 512 * (2 * 2 * 4 * K * D + 2 * (2 * E + 2 * F) + 2 * 512)  # 8 prompts: keys, values, one layer, the mask
  own = 2 * parameters + 32 * (2 * 2 * 4 * K * D * 4608 + drawn) + prefill
  weights = sampler_weight_bytes(FEW, on(device('h100'), run), run.quant, MeshAxes(data=4))
  assert found.total == pytest.approx(planned.update.state + weights + own, rel=1e-3)
  assert planned.kinds[3].rows == 64
  assert planned.fits == {'update': True, 'evaluation': False}
  assert f'fits: no, {(found.total - planned.usable) / 2**30:.1f} too much' in as_text(planned)


def test_the_most_mfu_by_hand():
  """Rows of 2,048 tokens, each one sequence with 1,536 tokens of the model. Two epochs take the same time for each operation."""
  run = dataclasses.replace(RUN, optimizer=Optimizer(epochs=2))
  found = plan(FEW, run, ONE, ONE, H200)
  micros, T = found.shape.micros, 2048
  forward = 2 * 4 * LAYER * micros * T + 2 * V * E * 64 * 1536 + 4 * 4 * H * D * micros * T * T // 2
  assert found.model_flops == 2 * 3 * forward
  assert found.most_mfu == pytest.approx(found.model_flops / found.work.seconds / 989e12)
  assert 0.5 < found.most_mfu < 1
  assert f'MFU at most {found.most_mfu:.0%}' in as_text(found)


@pytest.mark.parametrize('tokens', [8192, pytest.param(32768, marks=pytest.mark.slow)])
def test_updates_of_1_5b_may_reach_half_of_the_rate_of_an_h200(tokens):
  """The bound without recomputation. Rows of one answer each, with a prompt of 512 tokens."""
  run = dataclasses.replace(
    RUN, sampling=Sampling(max_prompt=512, max_tokens=tokens - 512, rows=64), rollout=Rollout(prompts=8, group=8),
    packing=Packing(row_tokens=tokens, rows=1), model=ModelSettings(path='', remat='none'),
  )  # fmt: skip
  assert plan(ModelConfig.read(MODELS / 'Qwen2.5-1.5B'), run, ONE, ONE, H200).most_mfu >= 0.5


@pytest.mark.parametrize('rollout', [MeshAxes(data=2, sequence=2), MeshAxes(sequence=4)])
def test_the_rollouts_mesh_has_no_sequence_axis(rollout):
  with pytest.raises(SettingsError, match=r'--rollout_mesh = sequence=\d: expected 1'):
    plan(FEW, RUN, MeshAxes(fsdp=4), rollout, H200)


def test_the_most_mfu_is_at_most_one_if_answers_share_a_prompt():
  """A full causal row of 32,768 tokens has far more pairs than its answers, which do not see each other."""
  run = dataclasses.replace(
    RUN, sampling=Sampling(max_prompt=512, max_tokens=1024, rows=64), rollout=Rollout(prompts=16, group=16),
    packing=Packing(row_tokens=32768, rows=1),
  )  # fmt: skip
  config = ModelConfig.read(MODELS / 'Qwen2.5-1.5B')
  assert 0.3 < plan(config, run, ONE, ONE, H200).most_mfu <= 1


@pytest.mark.parametrize(('samples', 'temperature', 'rows'), [(1, 0.0, 5), (4, 1.0, 20)])
def test_an_evaluation_has_no_more_rows_than_samples(samples, temperature, rows):
  asked = Evaluation(problems=5, samples=samples, temperature=temperature)
  found = plan(FEW, dataclasses.replace(RUN, eval=asked), ONE, ONE, H200).evaluation
  assert (found.rows, found.rows_asked) == (rows, rows)


def test_an_evaluation_with_the_samplers_memory_needs_as_much_as_rollouts():
  """It multiplies by the weights that the rollouts have. An evaluation in other number formats holds both."""
  run = dataclasses.replace(RUN, eval=Evaluation(memory='sampler'), quant=Quant(sampler='w8a8_kv8'))
  planned = plan(FEW, run, ONE, ONE, H200)
  own, held = planned.kinds[3], planned.update.state
  assert planned.evaluation.total == held + own.memory.total(64)
  short = dataclasses.replace(run, eval=Evaluation(max_tokens=64), cache=Cache())
  dense = plan(FEW, short, ONE, ONE, H200)
  weights = sampler_weight_bytes(FEW, on(H200, run), run.quant, ONE)
  sampling = dense.evaluation.total - held - weights
  assert dense.kinds[0].memory.total(64) - sampling == 64 * (1536 - 64) * (2 * 2 * 4 * K * D + 12)


def test_an_evaluation_is_on_the_learners_devices_if_rollouts_have_their_own():
  run = dataclasses.replace(RUN, devices=Devices(learner='0-3', rollout='4-5'))
  assert plan(FEW, run, MeshAxes(fsdp=4), MeshAxes(data=2), H200).evaluation.rows == 64 / 4


def test_an_evaluation_on_a_learner_with_a_sequence_axis_has_whole_sequences_on_each_device():
  run = dataclasses.replace(RUN, devices=Devices(learner='0-3', rollout='4-5'))
  assert plan(FEW, run, MeshAxes(fsdp=2, sequence=2), MeshAxes(data=2), H200).evaluation.rows == 64 / 4


def test_an_evaluation_has_the_rows_of_its_largest_set():
  sets = {'few': HeldOutSet(path='a', problems=5), 'hard': HeldOutSet(path='b', samples=8)}
  asked = Evaluation(problems=4, temperature=1.0, sets=sets)
  found = plan(FEW, dataclasses.replace(RUN, eval=asked), ONE, ONE, H200).evaluation
  assert found.rows_asked == 4 * 8


def test_an_evaluation_records_nothing():
  """Neither experts to replay nor evictions: training reads no answer of an evaluation."""
  for config, run in (
    (shallow(MIXTURE, 2), dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, router_replay='R3'))),
    (FEW, dataclasses.replace(RUN, arm='learner_mask')),
  ):
    asked = Evaluation(memory='sampler')
    found, plain = (plan(config, dataclasses.replace(each, eval=asked), ONE, ONE, H200) for each in (run, RUN))
    assert found.evaluation.total == plain.evaluation.total


def test_separate_devices_have_room_for_the_weights_that_arrive_during_rollouts():
  found = plan(FEW, dataclasses.replace(RUN, devices=Devices(learner='0', rollout='1')), ONE, ONE, H200)
  for kind in found.kinds:
    most, held = kind.most_rows, kind.memory
    assert held.total(most) + held.weights <= found.usable < held.total(most + 1) + held.weights


@pytest.mark.parametrize('apart', [False, True])
def test_rollouts_that_continue_leave_less_memory_to_update_and_evaluation(apart):
  def planned(sync, remat, there=H200):
    ahead = dataclasses.replace(RUN.rollout, async_ratio=1.0, sync=sync)
    devices = Devices(learner='0', rollout='1') if apart else Devices()
    return plan(FEW, with_remat(dataclasses.replace(RUN, rollout=ahead, devices=devices), remat), ONE, ONE, there)

  keeps, stops = planned('keep', 'none'), planned('recompute', 'none')
  assert stops.caches == 0
  assert keeps.caches == (0 if apart else 64 * keeps.kinds[2].memory.row)
  assert keeps.evaluation.total - stops.evaluation.total == keeps.caches
  assert ('of rollouts that continue after it' in as_text(keeps)) == (not apart)
  tight = dataclasses.replace(H200, memory=(stops.update.total + keeps.caches / 2) / 0.9)  # room for half of the caches
  assert planned('recompute', 'none', tight).fits['update']
  assert planned('keep', 'none', tight).fits['update'] == apart
  assert planned('recompute', 'auto', tight).remat == 'none'
  assert (planned('keep', 'auto', tight).remat == 'none') == apart


# --- kinds and layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('sampler', 'budget', 'name'),
  [('none', None, 'dense'), ('w8a8_kv8', 512, 'sparse fp8'), ('w8a8', None, 'dense w8a8'), ('kv8', 512, 'sparse kv8')],
)
def test_the_kind_of_rollouts_of_the_run_is_planned_and_compiled(sampler, budget, name, monkeypatch):
  run = dataclasses.replace(RUN, quant=Quant(sampler=sampler), cache=Cache(budget=budget))
  planned = plan(FEW, run, ONE, ONE, H200)
  assert [kind.name for kind in planned.kinds] == list(dict.fromkeys(['dense', 'dense fp8', 'sparse', 'sparse fp8', name]))
  own = next(kind for kind in planned.kinds if kind.name == name)
  assert (own.sampler, own.budget) == (sampler, budget)
  dense, fp8 = (planned.kinds[i + 2 * (budget is not None)] for i in range(2))
  assert own.kv_bytes == (fp8 if 'kv8' in sampler else dense).kv_bytes
  compiled = aot.Compiled((), '', 0, 0, 0, 1, ())
  monkeypatch.setattr(compile_check, 'check_update', lambda *_: compile_check.Check('update', 0, compiled))
  monkeypatch.setattr(compile_check, 'check_decode', lambda *arguments: compile_check.Check(arguments[-1].name, 0, compiled))
  checks = compile_check.checks(FEW, run, planned)
  assert [check.name for check in checks] == ['update', name]
  assert as_json(checks)[0]['compiled']['total'] == 1
  assert name in compile_check.as_text(checks)


@pytest.mark.parametrize(
  ('given', 'mesh'),
  [
    (Meshes(), 'data=2,fsdp=2,tensor=2'),
    (Meshes(Mesh(fsdp=4, tensor=2), Mesh(data=4, fsdp=1, tensor=2)), 'fsdp=8'),
    (Meshes(Mesh(data=8, fsdp=1), Mesh(data=2, fsdp=1, tensor=4)), 'data=8'),
  ],
)
def test_printed_flags_give_a_run_the_planned_layout(given, mesh):
  config = default_config()
  config.model.path = 'a model'
  config.mesh.update(dataclasses.asdict(given))
  axes = MeshAxes.parse(mesh)
  for flag in (*axes.flags(given.learner, 'learner'), *axes.gathered().flags(given.rollout, 'rollout')):
    name, _, size = flag.removeprefix('--config.').partition('=')
    with config.ignore_type():
      config.update_from_flattened_dict({name: int(size)})
  meshes = resolve(config).mesh
  assert [MeshAxes(**filled(each, 8)) for each in (meshes.learner, meshes.rollout)] == [axes, axes.gathered()]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('run', 'learner', 'rollout', 'setting'),
  [
    (RUN, MeshAxes(fsdp=8), MeshAxes(data=4), '--rollout_mesh: found 4 devices; expected 8'),
    (dataclasses.replace(RUN, lora=Lora(rank=8)), ONE, ONE, 'config.lora.rank = 8'),
    (dataclasses.replace(RUN, sampling=dataclasses.replace(RUN.sampling, top_p=0.9)), ONE, ONE, 'config.sampling.top_p = 0.9'),
    (RUN, MeshAxes(expert=3), MeshAxes(data=3), '--mesh: expert = 3'),
    (RUN, MeshAxes(data=3), MeshAxes(expert=3), '--rollout_mesh: expert = 3'),
  ],
)
def test_runs_that_cannot_be_planned_are_refused(run, learner, rollout, setting):
  with pytest.raises(SettingsError, match=re.escape(setting)):
    plan(MIXTURE, run, learner, rollout, H200)


@pytest.mark.parametrize('usable', [-1.0, 0.0, 1.5, float('nan')])
def test_an_impossible_fraction_of_memory_is_refused(usable):
  with pytest.raises(SettingsError, match=f'--usable={usable}'):
    plan(FEW, RUN, ONE, ONE, H200, usable)


def test_a_kernel_that_the_device_lacks_is_refused():
  run = dataclasses.replace(RUN, model=dataclasses.replace(RUN.model, kernels='mosaic_gpu'))
  with pytest.raises(SettingsError, match=r"config.model.kernels = 'mosaic_gpu': a100"):
    plan(FEW, run, ONE, ONE, device('a100'))


def test_unknown_devices_and_ceilings_are_refused():
  with pytest.raises(SettingsError, match='--device=b200: expected one of h100, h200'):
    device('b200')
  with pytest.raises(SettingsError, match='--memory=0'):
    device('h100', memory=0.0)


# --- the command -----------------------------------------------------------------------------------------------------


def command(model, *arguments):
  line = [sys.executable, '-m', 'sprl.plan', '--config=configs/qwen_gsm8k.py:qwen2.5-7b', f'--config.model.path={model}']
  return subprocess.run([*line, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_prints_the_numbers_of_the_planning_page(tmp_path):
  page = (ROOT / 'docs/planning.md').read_text(encoding='utf-8')
  flags = re.search(r'    python -m sprl\.plan --config=\S+ (.*)', page)[1]
  shown = re.search(r'```text\n(.*?)```', page, re.DOTALL)[1]
  (tmp_path / 'config.json').write_text((MODELS / 'Qwen2.5-7B' / 'config.json').read_text())
  out, drawn = tmp_path / 'plan.json', tmp_path / 'plan.picture'
  done = command(tmp_path, *flags.split(), f'--json={out}', f'--png={drawn}')
  assert done.returncode == 0, done.stderr
  numbers = {text: set(re.findall(r'\d[\d,.e+]*\d|\d', text)) for text in (shown, done.stdout)}
  assert len(numbers[shown]) > 30
  assert numbers[shown] <= numbers[done.stdout]
  entries = json.loads(out.read_text())
  assert entries['parameters'] == 7_615_616_512
  assert [kind['name'] for kind in entries['kinds']] == ['dense', 'dense fp8', 'sparse', 'sparse fp8']
  assert drawn.read_bytes().startswith(b'\x89PNG')


def test_a_file_that_cannot_be_written_is_reported_in_one_line_before_the_plan(tmp_path):
  done = command(MODELS / 'Qwen2.5-0.5B', f'--json={tmp_path}/none/plan.json')
  assert (done.returncode, done.stdout, done.stderr.count('\n')) == (2, '', 1)
  assert 'none/plan.json' in done.stderr
