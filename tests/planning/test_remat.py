"""model.remat = 'auto': the least recomputation whose planned update fits."""

import dataclasses

import pytest
from plans import FEW, RUN

from sprl.config import ModelSettings, Rollout, Run
from sprl.learner.batch import Shape
from sprl.model import Model
from sprl.planning import remat as remat_module
from sprl.planning.devices import device
from sprl.planning.estimate import plan
from sprl.planning.memory import caches_kept, update_memory
from sprl.planning.mesh_axes import MeshAxes
from sprl.planning.remat import as_stored, decided, least_that_fits, with_remat
from sprl.sharding.mesh import sizes

SHAPE = Shape(micros=8, rows=8, tokens=2048, sequences=64, columns=1536)
AUTO = with_remat(RUN, 'auto')
H200 = device('h200')


def test_less_room_recomputes_more():
  need = {remat: update_memory(FEW, with_remat(RUN, remat), SHAPE, MeshAxes()).total for remat in ('none', 'dots', 'layer')}
  assert need['none'] > need['dots'] > need['layer']
  for remat, room in need.items():
    assert least_that_fits(FEW, AUTO, SHAPE, MeshAxes(), float(room)) == remat
  assert least_that_fits(FEW, AUTO, SHAPE, MeshAxes(), need['layer'] - 1.0) == 'layer'  # it does not fit; the plan says so


def test_a_value_that_is_set_stays():
  assert least_that_fits(FEW, with_remat(RUN, 'dots'), SHAPE, MeshAxes(), 0.0) == 'dots'


@pytest.mark.parametrize(('gb', 'remat'), [(141, 'none'), (40, 'layer')])
def test_the_plan_shows_the_choice_and_plans_with_it(gb, remat):
  there = dataclasses.replace(H200, memory=gb * 1e9)
  found = plan(FEW, AUTO, MeshAxes(), MeshAxes(), there)
  assert found.remat == remat
  assert found.update == plan(FEW, with_remat(RUN, remat), MeshAxes(), MeshAxes(), there).update


def test_a_run_leaves_room_for_rollouts_that_continue_during_an_update(monkeypatch):
  rooms = []
  monkeypatch.setattr(remat_module, 'memory_of', lambda devices: 2**34)
  monkeypatch.setattr(remat_module, 'least_that_fits', lambda config, run, shape, axes, room: rooms.append(room) or 'layer')
  for sync in ('recompute', 'keep'):
    run = Run(model=ModelSettings(path='random:tiny'), rollout=Rollout(async_ratio=1.0, sync=sync))
    model = Model.open(run)
    decided(run, model)
  here = dataclasses.replace(run, model=dataclasses.replace(run.model, dtype=model.dtype.name, kernels='reference'))
  assert rooms[0] - rooms[1] == caches_kept(model.config, here, MeshAxes(**sizes(model.engine_meshes[0]))) > 0


def test_a_resumed_run_keeps_what_it_stored():
  """Also the value of a run from before the default changed."""
  old = {'model': {'remat': 'layer'}, 'packing': {'score_chunk': 256}}
  resumed = as_stored(Run(), old)
  assert (resumed.model.remat, resumed.packing.score_chunk) == ('layer', 256)
  asked = dataclasses.replace(with_remat(Run(), 'none'), packing=dataclasses.replace(Run().packing, score_chunk=512))
  assert as_stored(asked, old) == asked
  assert as_stored(Run(), {}) == Run()
