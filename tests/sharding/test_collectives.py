"""Collectives parsed from HLO: of a hand-written program, and of the programs of a step, compared with the planned ones."""

from collections import Counter

import pytest
from host_devices import on_devices

from sprl.planning.collectives import collectives

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


def test_collectives_of_a_hand_written_program():
  found = [(c.kind, c.arrays, c.devices, c.depth) for c in collectives(PROGRAM)]
  assert found == [
    ('all-gather', (128,), 2, 1),
    ('all-reduce', (1,), 4, 1),
    ('all-reduce', (64, 24), 4, 0),
    ('reduce-scatter', (512,), 4, 0),
    ('all-gather', (32,), 2, 0),
    ('all-reduce', (256,), 4, 0),
    ('collective-permute', (100,), 2, 0),
    ('all-to-all', (64,), 4, 0),
  ]
  assert [c.name for c in collectives(PROGRAM)][2] == 'jit(f)/sum'


def test_bytes_that_one_device_sends_in_a_ring():
  moved = [c.moved for c in collectives(PROGRAM)]
  assert moved == [64.0, 1.5, 1.5 * 88, 0.75 * 512, 16.0, 1.5 * 256, 100.0, 48.0]


# --- the programs of a step ------------------------------------------------------------------------------------------
# One layer, float32. E = 64, H = 4, K = 2, D = 16, F = 96, V = 264.

E, HD, KD, F, V = 64, 64, 32, 96, 264  # KD: K * D


def collectives_of(model):
  """Return the number of collectives of each program of a model, by kind, bytes, devices and loops around it."""
  found = on_devices('planned_collectives.py', model)
  return {name: Counter(tuple(each) for each in arrays) for name, arrays in found.items()}


@pytest.fixture(scope='module')
def sent():
  return collectives_of('dense')


@pytest.fixture(scope='module')
def sent_by_mixture():
  return collectives_of('mixture')


def larger(counts, least):
  return {key: n for key, n in counts.items() if key[1] >= least}


def test_an_update_sends_what_is_planned(sent):
  """data 2 x fsdp 2 x tensor 2; 8 rows of 16 tokens per microbatch, 2 on each of 4 devices; layers are recomputed."""
  t = 2  # parts of a matrix in use
  weights = {'q': HD * E, 'k': KD * E, 'v': KD * E, 'o': E * HD, 'gate': F * E, 'up': F * E, 'down': E * F}
  in_use = {name: 4 * size // t for name, size in weights.items()}
  rows = 4 * 2 * 16 * E  # bytes of a device's hidden states
  table = 4 * V // (2 * 2) * E  # bytes of a device's part of the embedding
  shards = 4 * 2 * 8 * E  # hidden states of a chunk, of the two shards that use one part of the vocabulary
  planned = Counter()
  for name, size in in_use.items():
    # fsdp: gathered forward, for recomputation (except the last product), and for the gradient of the input
    planned['all-gather', size, 2, 1] += 2 if name == 'down' else 3
    planned['all-reduce', size, 2, 1] += 1  # its gradient over fsdp; a GPU would reduce-scatter
    planned['all-reduce', size // 2, 2, 1] += 1  # the device's part of the gradient, over data
  planned['all-reduce', rows, 2, 1] += 3 + 5  # tensor: o forward and recomputed, down; backward from q, k, v, gate and up
  planned['all-reduce', 2 * rows, 4, 1] += 1  # the embeddings of the tokens, summed over parts of the vocabulary
  planned['all-gather', 2 * rows, 2, 1] += 1  # the gradients of the embeddings
  planned['all-reduce', table, 2, 1] += 2  # gradients of embedding and head, over data
  planned['all-gather', shards, 2, 2] += 2  # hidden states of a chunk, forward and backward
  planned['all-reduce', shards, 4, 2] += 1  # the gradient of a chunk
  assert larger(sent['update'], 1024) == planned


def test_a_decode_step_sends_what_is_planned(sent):
  """data 2 x tensor 4, of which 2 split the kv heads; 16 rows, 8 on each group of 4 devices; a sparse FP8 cache."""
  rows = 4 * 8 * E
  planned = Counter()
  planned['all-reduce', rows, 4, 1] += 3  # the tokens' embeddings, o, down
  planned['all-gather', 4 * 8 * HD // 2, 2, 1] += 1  # queries, to the devices that have their kv head
  planned['all-to-all', 4 * (8 // 4) * V // 4, 4, 1] += 4  # logits: from parts of all rows to whole rows
  planned['all-gather', 4 * 8, 4, 1] += 2  # drawn tokens and their log-probs
  assert larger(sent['decode'], 2) == planned
  assert sum(n for key, n in sent['decode'].items() if key[1] == 1) == 1  # whether all rows are done


@pytest.mark.parametrize('sync', ['sync', 'sync from tensor 2'])
def test_a_sync_moves_codes_and_no_weight_whole(sent, sync):
  """fsdp 8, or 4 x tensor 2, to data 2 x tensor 4, FP8 linears: one byte per weight, and a device receives at most its part."""
  largest = 4 * V * E // 4  # a part of the embedding; a CPU moves it in float32
  assert max(size for _, size, _, _ in sent[sync]) <= largest
  linears = {HD * E // 4, KD * E // 2, F * E // 4}
  assert linears <= {size for kind, size, _, _ in sent[sync] if kind == 'all-gather'}


# A mixture of one layer: 16 experts of width 48, two per token; D = 24.


@pytest.mark.slow
def test_an_update_of_experts_sends_tokens_to_them_and_no_expert_to_tokens(sent_by_mixture):
  """fsdp 2 x expert 2 x tensor 2; 2 rows of 16 tokens on each of 4 devices; 8 of the 16 experts on a device."""
  t = 2
  weights = {'q': 96 * E, 'k': 48 * E, 'v': 48 * E, 'o': E * 96}
  rows, table = 4 * 2 * 16 * E, 4 * V // (2 * 2) * E
  shards = 4 * 2 * 8 * E
  experts = 4 * 8 * E * 48 // t  # one of the three matrices of a device's experts
  planned = Counter()
  for size in (4 * size // t for size in weights.values()):
    planned['all-gather', size, 2, 1] += 3
    planned['all-reduce', size, 2, 1] += 1
    planned['all-reduce', size // 2, 2, 1] += 1  # over expert, whose devices have other rows and the same weights
  planned['all-gather', 4 * 16 * E, 2, 1] += 3  # the router; only fsdp splits it
  planned['all-reduce', 4 * 16 * E // 2, 4, 1] += 1  # the half of its gradient that a device keeps
  planned['collective-permute', 4 * 16 * E // 2, 2, 1] += 1  # moved by XLA
  planned['all-gather', experts, 2, 1] += 3 * 2  # over fsdp, forward and backward
  planned['reduce-scatter', experts, 2, 1] += 3  # the gradients of the experts
  planned['all-gather', 2 * rows, 2, 1] += 3  # tokens to experts, forward and backward, and the gradients of outputs
  planned['reduce-scatter', 2 * rows, 2, 1] += 2  # outputs of experts, and the gradients of tokens
  planned['all-reduce', rows, 2, 1] += 3 + 4  # tensor: o forward and recomputed, experts; backward from q, k, v and experts
  planned['all-reduce', 2 * rows, 4, 1] += 1  # the vocabulary, as in the dense model
  planned['all-gather', 2 * rows, 2, 1] += 1
  planned['all-reduce', table, 2, 1] += 2
  planned['all-gather', shards, 2, 2] += 2
  planned['all-reduce', shards, 4, 2] += 1
  assert larger(sent_by_mixture['update'], 1024) == planned


@pytest.mark.slow
def test_a_decode_step_of_experts_sends_tokens_to_them_and_back(sent_by_mixture):
  """data 2 x expert 4; 16 rows, 2 on each device."""
  rows = 4 * 8 * E
  planned = Counter()
  planned['all-gather', rows, 4, 1] += 1
  planned['all-gather', 4 * 8 * 2, 4, 1] += 2  # the numbers of the experts, and their gates
  planned['reduce-scatter', rows, 4, 1] += 1
  assert larger(sent_by_mixture['decode'], 2) == planned


@pytest.mark.slow
def test_a_sync_gathers_experts_on_the_devices_that_sample_with_them(sent_by_mixture):
  """fsdp 4 x expert 2 to data 2 x expert 4: FP8 codes; every device has the whole vocabulary."""
  experts = 16 * E * 48 // 4
  gathered = {size: n for (kind, size, *_), n in sent_by_mixture['sync'].items() if kind == 'all-gather' and size >= experts}
  assert gathered == {experts: 3, 4 * V * E: 2}


# --- benchmarks/scaling.py ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scaling_counts_gradients_once_and_tokens_to_experts():
  found = on_devices('scaled.py')
  data, expert = found['data'], found['expert']
  assert data['all-reduce MB'] == data['MB sent'] == pytest.approx(4 * found['weights'] / 1e6)  # each gradient once
  rows, chosen = 4 * 4 * E, 4 * 4 * 2  # hidden states of 4 rows; numbers or gates of 2 experts
  assert expert['all-gather MB'] == pytest.approx((rows + 2 * chosen) / 2 / 1e6)
  assert expert['reduce-scatter MB'] == pytest.approx(rows / 2 / 1e6)
