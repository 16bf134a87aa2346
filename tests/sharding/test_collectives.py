"""Collectives read off HLO: by hand-written programs, and off the real ones, which send what is planned and nothing else."""

from collections import Counter

import pytest
from test_mesh import on_devices

from sprl.planning.collectives import by_kind, collectives

PROGRAM = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%inner (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %gathered = bf16[8,8]{1,0} all-gather(bf16[4,8]{1,0} %x), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
  %alone = f32[4]{0} all-reduce(f32[4]{0} %y), channel_id=2, replica_groups={{0},{1}}, to_apply=%add
}

%test (p: (s32[], bf16[4,8])) -> pred[] {
  %any = pred[] all-reduce(pred[] %z), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%or
}

ENTRY %main (p0: f32[16]) -> f32[16] {
  %loop = (s32[], bf16[4,8]) while((s32[], bf16[4,8]) %t), condition=%test, body=%inner
  %both = (f32[16]{0}, s32[2,3]{1,0}) all-reduce(f32[16]{0} %p0, s32[2,3]{1,0} %q), channel_id=4, \
replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, to_apply=%add, metadata={op_name="jit(f)/sum"}
  %part = f8e4m3fn[2,64]{1,0} reduce-scatter(f8e4m3fn[8,64]{1,0} %r), replica_groups=[2,4]<=[2,4]T(1,0), dimensions={0}
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(f32[4]{0} %u), channel_id=5, replica_groups=[1,2]<=[2], dimensions={0}
  %done = f32[8]{0} all-gather-done((f32[4]{0}, f32[8]{0}) %start)
  %begun = ((bf16[16,8]{1,0}), bf16[16,8]{1,0}) all-reduce-start(bf16[16,8]{1,0} %s), replica_groups=[2,4]<=[8], to_apply=%add
  %turned = u8[100]{0} collective-permute(u8[100]{0} %v), source_target_pairs={{0,1},{1,0}}
  %stays = u8[100]{0} collective-permute(u8[100]{0} %v), source_target_pairs={{0,0},{1,1}}
  %halves = f32[16]{0} all-to-all(f32[16]{0} %w), replica_groups=mesh['a'=8] {'a':(2)4}, dimensions={0}
}
"""


def test_a_program_by_hand():
  found = [(c.kind, c.arrays, c.devices, c.depth, c.dtypes) for c in collectives(PROGRAM)]
  assert found == [
    ('all-gather', (128,), 2, 1, ('bf16',)),
    ('all-reduce', (1,), 4, 1, ('pred',)),
    ('all-reduce', (64, 24), 4, 0, ('f32', 's32')),
    ('reduce-scatter', (512,), 4, 0, ('f8e4m3fn',)),
    ('all-gather', (32,), 2, 0, ('f32',)),
    ('all-reduce', (256,), 4, 0, ('bf16',)),
    ('collective-permute', (100,), 2, 0, ('u8',)),
    ('all-to-all', (64,), 4, 0, ('f32',)),
  ]
  assert [c.name for c in collectives(PROGRAM)][2] == 'jit(f)/sum'


def test_what_a_device_sends_in_a_ring():
  table = by_kind(collectives(PROGRAM))
  assert table['all-gather'] == {'count': 2, 'bytes': 160, 'moved': 80.0}
  assert table['all-reduce'] == {'count': 3, 'bytes': 345, 'moved': 1.5 * 345}
  assert table['reduce-scatter'] == {'count': 1, 'bytes': 512, 'moved': 384.0}
  assert table['collective-permute'] == {'count': 1, 'bytes': 100, 'moved': 100.0}
  assert table['all-to-all'] == {'count': 1, 'bytes': 64, 'moved': 48.0}


# --- the programs of a step ------------------------------------------------------------------------------------------
# One layer, float32. E = 64, H = 4, K = 2, D = 16, F = 96, V = 264.

E, HD, KD, F, V = 64, 64, 32, 96, 264  # KD: K * D


@pytest.fixture(scope='module')
def sent():
  return {
    name: Counter((kind, size, devices, depth) for kind, size, devices, depth in arrays)
    for name, arrays in on_devices('planned_collectives.py').items()
  }


def larger(counts, least):
  return {key: n for key, n in counts.items() if key[1] >= least}


def test_an_update_sends_what_is_planned(sent):
  """data 2 x fsdp 2 x tensor 2; 2 rows of 16 tokens each on 4 devices, 8 rows a microbatch; a layer computed again."""
  t = 2  # of the matrices, in use
  weights = {'q': HD * E, 'k': KD * E, 'v': KD * E, 'o': E * HD, 'gate': F * E, 'up': F * E, 'down': E * F}
  in_use = {name: 4 * size // t for name, size in weights.items()}
  rows = 4 * 2 * 16 * E  # hidden states of a device
  table = 4 * V // (2 * 2) * E  # its part of the vocabulary
  shards = 4 * 2 * 8 * E  # hidden states of a chunk of the head, of the two shards that meet a part of the vocabulary
  planned = Counter()
  for name, size in in_use.items():
    # fsdp: gathered forwards, again (but for the last product, which nothing needs), and for the gradient of what went in
    planned['all-gather', size, 2, 1] += 2 if name == 'down' else 3
    planned['all-reduce', size, 2, 1] += 1  # its gradient over fsdp, where a GPU scatters it as it sums,
    planned['all-reduce', size // 2, 2, 1] += 1  # and the part that is kept, over data
  planned['all-reduce', rows, 2, 1] += 3 + 5  # tensor: o forwards and again, down; backwards from q, k, v, gate and up
  planned['all-reduce', 2 * rows, 4, 1] += 1  # the tokens' embeddings, from whichever part of the vocabulary has them
  planned['all-gather', 2 * rows, 2, 1] += 1  # and their gradients
  planned['all-reduce', table, 2, 1] += 2  # gradients of embedding and head, over data
  planned['all-gather', shards, 2, 2] += 2  # a chunk to the vocabulary, forwards and backwards,
  planned['all-reduce', shards, 4, 2] += 1  # and its gradient
  assert larger(sent['update'], 1024) == planned


def test_a_decode_step_sends_what_is_planned(sent):
  """data 2 x tensor 4, of which 2 split the kv heads; 16 rows, 8 on each four devices; a sparse FP8 cache."""
  rows = 4 * 8 * E
  planned = Counter()
  planned['all-reduce', rows, 4, 1] += 3  # the tokens' embeddings, o, down
  planned['all-gather', 4 * 8 * HD // 2, 2, 1] += 1  # queries, to all that have their kv head
  planned['all-to-all', 4 * (8 // 4) * V // 4, 4, 1] += 4  # logits: from a part of every row's to all of some rows'
  planned['all-gather', 4 * 8, 4, 1] += 2  # tokens and their log-probs
  assert larger(sent['decode'], 2) == planned
  assert sum(n for key, n in sent['decode'].items() if key[1] == 1) == 1  # whether all rows are done


@pytest.mark.parametrize('sync', ['sync', 'sync from tensor 2'])
def test_a_sync_moves_codes_and_no_weight_whole(sent, sync):
  """fsdp 8, or 4 x tensor 2, to data 2 x tensor 4, linears in FP8: a byte a weight, and what is served of one is the most that a
  device gets."""
  largest = 4 * V * E // 4  # the embedding's part, which a CPU moves in float32
  assert max(size for _, size, _, _ in sent[sync]) <= largest
  linears = {HD * E // 4, KD * E // 2, F * E // 4}
  assert linears <= {size for kind, size, _, _ in sent[sync] if kind == 'all-gather'}


# A mixture of one layer: 16 experts, two a token, F = 48 of each; D = 24.


def test_an_update_of_experts_sends_tokens_to_them_and_no_expert_to_tokens(sent):
  """fsdp 2 x expert 2 x tensor 2; 2 rows of 16 tokens each on 4 devices, half of all 16 experts on a device."""
  t = 2
  weights = {'q': 96 * E, 'k': 48 * E, 'v': 48 * E, 'o': E * 96}
  rows, table = 4 * 2 * 16 * E, 4 * V // (2 * 2) * E
  shards = 4 * 2 * 8 * E
  experts = 4 * 8 * E * 48 // t  # one of the three matrices of a device's experts
  planned = Counter()
  for size in (4 * size // t for size in weights.values()):
    planned['all-gather', size, 2, 1] += 3
    planned['all-reduce', size, 2, 1] += 1
    planned['all-reduce', size // 2, 2, 1] += 1  # over expert, whose devices have rows of their own and the same weights
  planned['all-gather', 4 * 16 * E, 2, 1] += 3  # the router, which no axis but fsdp splits,
  planned['all-reduce', 4 * 16 * E // 2, 4, 1] += 1  # and the half of its gradient that a device keeps,
  planned['collective-permute', 4 * 16 * E // 2, 2, 1] += 1  # which XLA hands on
  planned['all-gather', experts, 2, 1] += 3 * 2  # over fsdp, forwards and backwards,
  planned['reduce-scatter', experts, 2, 1] += 3  # and their gradients
  planned['all-gather', 2 * rows, 2, 1] += 3  # tokens to experts, forwards and backwards, and with their gradients
  planned['reduce-scatter', 2 * rows, 2, 1] += 2  # back, and their gradients
  planned['all-reduce', rows, 2, 1] += 3 + 4  # tensor: o forwards and again, experts; backwards from q, k, v and experts
  planned['all-reduce', 2 * rows, 4, 1] += 1  # the vocabulary's, as of the other model
  planned['all-gather', 2 * rows, 2, 1] += 1
  planned['all-reduce', table, 2, 1] += 2
  planned['all-gather', shards, 2, 2] += 2
  planned['all-reduce', shards, 4, 2] += 1
  assert larger(sent['update of experts'], 1024) == planned


def test_a_decode_step_of_experts_sends_tokens_to_them_and_back(sent):
  """data 2 x expert 4; 16 rows, two on each device."""
  rows = 4 * 8 * E
  planned = Counter()
  planned['all-gather', rows, 4, 1] += 1
  planned['all-gather', 4 * 8 * 2, 4, 1] += 2  # which experts, and their gates
  planned['reduce-scatter', rows, 4, 1] += 1
  assert larger(sent['decode of experts'], 2) == planned


def test_a_sync_gathers_experts_where_they_are_to_be(sent):
  """fsdp 4 x expert 2 to data 2 x expert 4: codes, of which two copies meet last; the vocabulary is whole on every device."""
  experts = 16 * E * 48 // 4
  gathered = {size: n for (kind, size, *_), n in sent['sync of experts'].items() if kind == 'all-gather' and size >= experts}
  assert gathered == {experts: 3, 4 * V * E: 2}


# --- benchmarks/scaling.py ---------------------------------------------------------------------------------------------


def test_the_table_of_what_more_devices_send_counts_gradients_once_and_tokens_to_experts():
  found = on_devices('scaled.py')
  data, expert = found['data'], found['expert']
  assert data['all-reduce MB'] == data['MB sent'] == pytest.approx(4 * found['weights'] / 1e6)  # every gradient's, once
  rows, chosen = 4 * 4 * E, 4 * 4 * 2  # hidden states of four rows, and which two experts or their gates
  assert expert['all-gather MB'] == pytest.approx((rows + 2 * chosen) / 2 / 1e6)
  assert expert['reduce-scatter MB'] == pytest.approx(rows / 2 / 1e6)
