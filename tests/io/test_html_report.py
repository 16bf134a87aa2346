"""The HTML report: complete for every kind of run, safe for any text, and working in a real browser."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from sprl.config import Run, SettingsError, to_dict
from sprl.io import html_report
from sprl.io.config_file import write_config
from sprl.io.html_report import held_out_samples, partners, report_html, write_report
from sprl.io.metrics import RunLog, held_out_sets
from sprl.io.provenance import commit, provenance
from sprl.io.report_charts import (
  CURVES,
  charts,
  curve,
  ledger_charts,
  memory,
  reward_chart,
  step_times,
  timeline_data,
)
from sprl.rollout.timeline import Timeline

ATTACK = '</script><script>document.documentElement.dataset.attacked = 1</script><img src=x onerror="document.title = 1"> & <b>'
SECTIONS = ['curves', 'evaluations', 'mismatch', 'samples', 'speed', 'timeline', 'warnings', 'settings', 'all-metrics']


def settings(**changes):
  made = to_dict(Run())
  made['model']['path'], made['steps'] = 'some/model', 3
  return made | changes


def evaluated(score):
  return {'eval/avg@k': score, 'eval/low': score - 0.1, 'eval/high': score + 0.1, 'eval/problems': 4.0, 'eval/truncated': 0.5}


def write_run(workdir, steps=3, ledger=True, samples=True, trace=True, checkpoint=True, starts=True):
  """Write the folder of a run. Every text that a model or a user could write is an attack."""
  write_config(workdir, settings(task={**to_dict(Run())['task'], 'system': ATTACK}))
  if starts:
    starts = [
      {'step': 0, 'sprl': '0.2', 'jax': '0.12', 'devices': '2 x cpu', 'time': 0.0, 'commit': 'abc'},
      {'step': 2, 'sprl': '0.2'},
    ]
    (workdir / 'starts.json').write_text(json.dumps({'from': {'workdir': '/runs/sft', 'step': 9}, 'starts': starts}))
  log = RunLog(workdir, None)
  log.evaluation(0, evaluated(0.25))
  for step in range(1, steps + 1):
    if ledger:
      entries = {'gap': np.array([0.5, -0.5]), 'kv': np.array([0.25, -0.25]), 'eviction': np.array([0.25, -0.25])}
      scalars = {f'ledger/{name}_abs': float(np.abs(x).mean()) for name, x in entries.items()}
      histograms = {name: [int((x < 0).sum()), 0, int((x > 0).sum())] for name, x in entries.items()}
      log.ledger(step, scalars, {'edges': [-0.1, 0.1], 'histograms': histograms}, entries)
    metrics = {'reward/mean': step / 4, 'policy/entropy': 1.0, 'sparse/agreement_p05': 0.5, 'rollout_corr/k3_kl': 1e-4}
    log.write(step, {**metrics, f'env/{ATTACK}': 1.0}, {'rollout': 9.0 if step == 1 else 2.0, 'learn': 1.0})
    if samples:
      log.samples(step, [{'prompt': ATTACK, 'completion': ATTACK, 'answer': ATTACK, 'reward': 0.5, 'finish': ATTACK}])
  log.close()
  if trace:
    timeline = Timeline(lambda: 0.0)
    timeline.add('engine 0', 'chunk', 5.0, 6.0)
    timeline.add('groups', 'group 7', 5.0, 6.5)
    for step in range(1, steps + 1):
      timeline.add('learner', f'update {step}', 6.0 + step, 6.5 + step)
    timeline.add(ATTACK, ATTACK, 8.0, 9.0)
    timeline.write(workdir / 'trace.json')
  if checkpoint:
    folder = workdir / 'checkpoints' / 'step_000003'
    folder.mkdir(parents=True)
    rows = [{'prompt': f'2 + {i}', 'completion': ATTACK, 'answer': '4', 'reward': 0.0, 'finish': 'stop'} for i in range(6)]
    later = [row | {'reward': 1.0} for row in rows]
    extra = {'before': {'samples': rows}, 'after': {'samples': later}}
    (folder / 'record.json').write_text(json.dumps({'record': {'extra': extra}, 'crc32': 0}))
  return workdir


class Outline(HTMLParser):
  """The elements and the text of a page, and the depth at which unclosed elements would be left."""

  def __init__(self, page):
    super().__init__()
    self.elements, self.text, self.open = [], [], []
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in ('meta', 'img'):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)

  def count(self, tag):
    return sum(name == tag for name, _ in self.elements)


def data_of(page):
  return json.loads(re.search(r'<script type="application/json" id="data">(.*)</script>', page)[1])


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_every_section_and_is_complete_in_itself(tmp_path):
  path = write_report(write_run(tmp_path / 'run'))
  assert path == tmp_path / 'run' / 'report.html'
  page = path.read_text()
  outline = Outline(page)
  assert outline.open == []
  assert [attributes['id'] for tag, attributes in outline.elements if tag == 'section'] == SECTIONS
  assert not any({'src', 'href'} & attributes.keys() and not attributes.get('href', '#').startswith('#')
                 for _, attributes in outline.elements)  # fmt: skip
  assert 'http' not in re.sub(r'http-equiv|http://www.w3.org/2000/svg', '', page)
  assert 'absent"' not in page.replace('<noscript><p class="absent"', '')
  assert len(page) < 200_000


def test_text_of_a_model_stays_text(tmp_path):
  page = report_html(write_run(tmp_path))
  outline = Outline(page)
  assert outline.count('script') == 2
  assert outline.count('img') == outline.count('b') - 1 == 0  # one <b> is the report's own
  assert '\n'.join(outline.text).count(ATTACK) >= 3 * 3 + 6
  assert data_of(page)['timeline']['kinds'][-1] == ATTACK


@pytest.mark.parametrize(
  ('without', 'said'),
  [
    ('ledger', 'set config.ledger.every'),
    ('samples', 'No table of samples'),
    ('trace', 'trace.json is not written yet'),
    ('starts', 'are not recorded'),
  ],
)
def test_a_section_says_why_it_is_empty(tmp_path, without, said):
  assert said in report_html(write_run(tmp_path, **{without: False}))


def test_a_run_in_progress_has_a_report(tmp_path):
  page = report_html(write_run(tmp_path / 'begun', steps=0, ledger=False, samples=False, trace=False, checkpoint=False))
  assert page.count('No step is finished yet.') == 3
  assert '0 of 3 steps' in page
  page = report_html(write_run(tmp_path / 'half', steps=2))
  assert '2 of 3 steps' in page


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match=r'config\.json'):
    write_report(tmp_path)
  write_config(tmp_path, settings())
  RunLog(tmp_path, None).close()
  with pytest.raises(SettingsError, match=r'metrics\.jsonl is empty'):
    write_report(tmp_path)


def test_warnings_name_the_symptom_the_range_the_worst_step_and_settings(tmp_path):
  text = ' '.join(Outline(report_html(write_run(tmp_path, steps=4))).text)
  found = 'sampler and learner differ much median of sparse/agreement_p05 over 3 steps 0.86 or more 2 3 0.5 (step 3)'
  assert re.search(re.escape(found) + r' .* Try .*config\.ledger\.every = 1', text)


def test_the_reason_for_which_a_guard_stopped_the_run_is_shown(tmp_path):
  """The guards of streaks count the steps: two of each kind stop a run."""
  log = RunLog(write_run(tmp_path, steps=1, checkpoint=False), 1)
  for step, metrics in ((2, {'completion/truncated': 1.0}), (3, {'completion/truncated': 1.0, 'rollout_corr/kl': 1.5})):
    log.write(step, metrics, {'rollout': 2.0})
  log.write(4, {'completion/truncated': 0.5, 'rollout_corr/kl': -1.5}, {'rollout': 2.0})
  log.close()
  page = report_html(tmp_path)
  text = ' '.join(Outline(page).text)
  assert 'Step 3: every response hit the length limit for 2 steps in a row' in text
  assert 'Step 4: rollout_corr/kl = -1.5, beyond 1.0 for 2 steps in a row' in text
  assert page.count('<p class="stop">') == 2


def test_a_metric_that_is_not_finite_has_a_row_of_its_own(tmp_path):
  log = RunLog(write_run(tmp_path, checkpoint=False), 3)
  log.write(4, {'env/a': 1.0, 'reward/mean': 1.0, 'policy/entropy': math.nan}, {'rollout': 2.0})
  log.close()
  text = ' '.join(Outline(report_html(tmp_path)).text)
  assert 'a metric is not finite policy/entropy finite 1 4 nan (step 4) The weights may have diverged. Try a lower' in text
  assert 'the entropy' not in text


def test_settings_that_differ_from_the_defaults_are_listed(tmp_path):
  text = ' '.join(Outline(report_html(write_run(tmp_path))).text)
  assert 'config.steps 3 100' in text
  assert 'config.seed' not in text


def test_long_text_is_cut_and_many_tables_are_thinned(tmp_path, monkeypatch):
  monkeypatch.setattr(html_report, 'MOST_TABLES', 3)
  write_run(tmp_path, samples=False, checkpoint=False)
  log = RunLog(tmp_path, 3)
  for step in range(10, 60, 10):
    log.samples(step, [{'prompt': 'p', 'completion': 'x' * 7000, 'reward': 0.0}])
  log.close()
  page = report_html(tmp_path)
  assert re.findall(r'<summary>Step (\d+)', page) == ['50', '30', '10']
  assert 'x' * 6000 + ' ... (1000 more characters)' in page


def test_samples_are_compared_with_later_ones_of_the_same_set_and_prompt():
  def row(prompt, completion, **more):
    return {'prompt': prompt, 'completion': completion, **more}

  before = [row('p', 'one'), row('p', 'two'), row('q', 'three'), row('q', 'four', set='m')]
  after = [row('p', 'ONE'), row('q', 'THREE'), row('q', 'more'), row('q', 'FOUR', set='m')]
  found = [(old['completion'], new and new['completion']) for old, new in partners(before, after)]
  assert found == [('one', 'ONE'), ('two', None), ('three', 'THREE'), ('four', 'FOUR')]


def test_samples_of_a_damaged_checkpoint_are_those_of_the_one_before(tmp_path):
  write_run(tmp_path)
  (tmp_path / 'checkpoints' / 'step_000009').mkdir()
  (tmp_path / 'checkpoints' / 'step_000009' / 'record.json').write_text('{"rec')
  before, after = held_out_samples(tmp_path)
  assert [len(before), len(after)] == [6, 6]
  assert held_out_samples(tmp_path / 'nothing') == ([], [])


def test_the_header_names_origin_versions_devices_and_starts(tmp_path):
  text = ' '.join(Outline(report_html(write_run(tmp_path))).text)
  for fact in ('from step 9 of sft', 'sprl 0.2', 'started 1970-01-01 00:00 UTC', 'started 2 times'):
    assert fact in text


def test_the_commit_is_that_of_the_checkout_that_holds_the_package(tmp_path):
  def git(*arguments):
    subprocess.run(
      ['git', '-C', tmp_path, '-c', 'user.name=a', '-c', 'user.email=a', *arguments], check=True, capture_output=True
    )

  package = tmp_path / 'package'
  package.mkdir()
  (package / '__init__.py').write_text('a = 1')
  git('init')
  assert commit(package) is None  # not a file of the checkout
  git('add', '.')
  git('commit', '-m', 'one')
  found = commit(package)
  assert re.fullmatch('[0-9a-f]{12}', found)
  (package / '__init__.py').write_text('a = 2')
  assert commit(package) == f'{found}+changes'
  assert provenance()['time'] > 1.7e9


# --- the data of the charts -------------------------------------------------------------------------------------------


def test_a_curve_keeps_the_last_of_many_points_and_leaves_out_what_is_not_finite():
  drawn = curve('x', np.arange(1, 1502), np.arange(1501.0), color=0)
  assert len(drawn['x']) <= 600
  assert (drawn['x'][-1], drawn['y'][-1]) == (1501, 1500.0)
  assert np.ptp(np.diff(drawn['x'])) == 0
  drawn = curve('x', np.array([1, 2, 3]), np.array([0.5, np.nan, np.inf]), color=0)
  assert (drawn['x'], drawn['y']) == ([1], [0.5])


def test_the_reward_chart_has_every_held_out_set_with_its_interval():
  records = [
    {'kind': 'train', 'step': 1, 'reward/mean': 0.0}, {'kind': 'train', 'step': 2, 'reward/mean': 1.0},
    {'kind': 'eval', 'step': 2, 'eval/sums/avg@k': 0.5, 'eval/sums/low': 0.25, 'eval/sums/high': 0.75, 'eval/avg@k': 0.5},
  ]  # fmt: skip
  assert held_out_sets(records) == {'eval/avg@k': 'held out', 'eval/sums/avg@k': 'held out sums'}
  one, mean, other, sums = reward_chart(records)['series']
  assert (one['y'], mean['y']) == ([0.0, 1.0], [0.0, 0.5])
  assert (sums['label'], sums['x'], sums['low'], sums['high']) == ('held out sums', [2], [0.25], [0.75])
  assert 'low' not in other


def test_only_charts_with_values_are_made():
  records = [{'kind': 'train', 'step': 1, 'policy/entropy': 0.5, 'update/grad_norm': float('nan')}]
  assert [chart['title'] for chart in charts(records, CURVES)] == ['Entropy']


def test_a_first_step_that_compiles_is_cut_and_named():
  records = [{'step': s, 'kind': 'train', 'time': {'rollout': r, 'learn': 1.0}} for s, r in ((1, 40.0), (2, 2.0), (3, 3.0))]
  (chart,) = step_times(records)
  assert [(c['label'], c['y']) for c in chart['series']] == [('rollout', [40.0, 2.0, 3.0]), ('learn', [1.0, 1.0, 1.0])]
  assert chart['limit'] == pytest.approx(1.2 * 4.0)
  assert chart['cut'] == 'cut off: step 1, 41 s (compiles)'
  assert step_times(records[1:])[0]['limit'] is None


def test_memory_has_the_unit_of_its_largest_value():
  (chart,) = memory([{'kind': 'train', 'step': 1, 'sparse/cache_bytes': 3 * 2**20}])
  assert (chart['unit'], chart['series'][0]['y']) == ('MiB', [3.0])
  (chart,) = memory([{'kind': 'train', 'step': 1, 'sparse/cache_bytes': 2**29, 'time': {'host_memory': 2.0**32}}])
  assert (chart['unit'], [c['y'] for c in chart['series']]) == ('GiB', [[0.5], [4.0]])
  assert memory([]) == []


def test_the_ledger_stacks_the_causes_that_are_not_zero():
  ledger = {
    'kind': 'ledger', 'step': 5, 'ledger/gap_abs': 0.3, 'ledger/kv_abs': 0.2, 'ledger/routing_abs': 0.0,
    'ledger/weights_abs': 0.2,
    'edges': [-0.1, 0.1], 'histograms': {'gap': [1, 2, 3], 'kv': [0, 6, 0], 'weights': [1, 5, 0]},
  }  # fmt: skip
  stack, tokens = ledger_charts([ledger])
  assert [(c['label'], c['kind']) for c in stack['series']] == [('weights', 'line'), ('kv', 'line'), ('whole mismatch', 'points')]
  assert [(c['label'], c['y']) for c in tokens['series']] == [('whole mismatch', [1, 2, 3]), ('weights', [1, 5, 0])]
  assert tokens['categories'] == ['below -0.1', '-0.1 to 0.1', 'above 0.1']


def test_the_timeline_is_in_milliseconds_since_its_first_span():
  rows = ('engine 0', 'learner')
  spans = [(1, 'update 1', 3.0, 4.0), (0, 'chunk', 2.0, 1.0), (1, 'update 2', 8.0, 1.0), (1, 'update 3', 9.0, 1.0)]
  events: list[dict] = [{'ph': 'M', 'tid': i, 'args': {'name': name}} for i, name in enumerate(rows)]
  events += [{'ph': 'X', 'tid': tid, 'name': name, 'ts': at * 1e6, 'dur': length * 1e6} for tid, name, at, length in spans]
  data = timeline_data(events)
  assert data['rows'] == list(rows)
  assert data['spans'] == [
    [0, 0, 0.0, 1000.0, None],
    [1, 1, 1000.0, 4000.0, 1],
    [1, 1, 6000.0, 1000.0, 2],
    [1, 1, 7000.0, 1000.0, 3],
  ]
  assert data['steps'] == [[5000.0, 1], [7000.0, 2], [8000.0, 3]]
  assert data['compiled'] == [1]
  assert timeline_data([])['spans'] == []


# --- in a browser -----------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable'))), None)
QUIET = [
  '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync', '--disable-dev-shm-usage',
]  # fmt: skip
# Opens a table of samples, a group of metrics and a zoom as a reader does, then notes what the browser shows.
PROBE = """
const found = document.documentElement.dataset;
const table = document.querySelector('details.step');
found.closed = table.querySelector('pre').checkVisibility();
table.querySelector('summary').click();
found.opened = table.querySelector('pre').checkVisibility();
found.completion = table.querySelector('.completion pre').textContent;
const bars = () => document.querySelectorAll('#gantt rect[data-span]').length;
found.bars = bars();
for (let i = 0; i < 4; i++) document.querySelector('[data-zoom=in]').click();
found.zoomed = bars();
document.querySelector('[data-zoom=all]').click();
found.whole = bars();
const legend = document.querySelector('figure.wide .legend button');
const paths = () => legend.closest('figure').querySelectorAll('svg path').length;
const before = paths();
legend.click();
found.hidden = before - paths();
const moved = new PointerEvent('pointermove', {clientX: innerWidth / 2, clientY: 300});
legend.closest('figure').querySelector('svg').dispatchEvent(moved);
found.tip = document.querySelector('.tip').textContent;
found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
found.columns = getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length;
document.querySelector('details.all summary').click();
setTimeout(() => { found.metrics = document.querySelectorAll('details.all[open] figure svg path').length; }, 200);
"""


def browse(path, folder, width):
  """Return the attributes of <html>, and the page, after its scripts ran in a window of this width."""
  command = [
    BROWSER,
    *QUIET,
    f'--user-data-dir={folder}',
    f'--window-size={width},900',
    '--virtual-time-budget=3000',
    '--dump-dom',
  ]
  page = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
  return next(attributes for tag, attributes in Outline(page).elements if tag == 'html'), page


@pytest.mark.skipif(BROWSER is None, reason='needs a browser: chromium or google-chrome on PATH')
def test_a_browser_runs_the_page_without_errors_and_runs_no_other_script(tmp_path):
  state, page = browse(write_report(write_run(tmp_path / 'run')), tmp_path / 'browser', 1300)
  assert state == {'lang': 'en', 'data-ready': 'yes'}  # neither an error nor the mark of the attack
  outline = Outline(page)
  ids = [attributes.get('id') for _, attributes in outline.elements]
  assert [name for name in ids if name in SECTIONS] == SECTIONS
  charts_ = {a['data-chart']: i for i, (tag, a) in enumerate(outline.elements) if 'data-chart' in a}
  assert len(charts_) > 5
  for name, i in charts_.items():
    drawn = [tag for tag, _ in outline.elements[i + 1 : i + 3]]
    assert drawn == ['figcaption', 'b'] or name.startswith('all-'), name
  assert outline.count('img') == 0


@pytest.mark.skipif(BROWSER is None, reason='needs a browser: chromium or google-chrome on PATH')
@pytest.mark.parametrize(('width', 'columns'), [(1300, '2'), (500, '1')])
def test_a_reader_opens_samples_zooms_and_hides_curves(tmp_path, width, columns):
  path = write_report(write_run(tmp_path / 'run'))
  page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', '', path.read_text())  # it would stop the probe
  path.write_text(page.replace('</body>', f'<script>{{{PROBE}}}</script></body>'))
  state, _ = browse(path, tmp_path / 'browser', width)
  assert 'data-error' not in state
  assert 'data-attacked' not in state
  assert (state['data-closed'], state['data-opened'], state['data-completion']) == ('false', 'true', ATTACK)
  assert int(state['data-bars']) == int(state['data-whole']) == 6
  assert 0 < int(state['data-zoomed']) < 6
  assert state['data-hidden'] == '1'
  assert state['data-tip'].startswith('step ')
  assert (state['data-overflow'], state['data-columns']) == ('0', columns)
  assert int(state['data-metrics']) >= 1
