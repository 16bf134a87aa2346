"""model.remat = 'auto': the least recomputation whose planned update fits."""

import dataclasses

import pytest
from plans import FEW, RUN

from sprl.config import Run
from sprl.learner.batch import Shape
from sprl.planning.devices import device
from sprl.planning.estimate import plan
from sprl.planning.memory import update_memory
from sprl.planning.mesh_axes import MeshAxes
from sprl.planning.remat import as_stored, least_that_fits, with_remat

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


def test_a_resumed_run_keeps_what_it_stored():
  """Also the value of a run from before the default changed."""
  old = {'model': {'remat': 'layer'}, 'packing': {'score_chunk': 256}}
  resumed = as_stored(Run(), old)
  assert (resumed.model.remat, resumed.packing.score_chunk) == ('layer', 256)
  asked = dataclasses.replace(with_remat(Run(), 'none'), packing=dataclasses.replace(Run().packing, score_chunk=512))
  assert as_stored(asked, old) == asked
  assert as_stored(Run(), {}) == Run()
