"""The readers of compiled programs, on small texts written by hand: HLO, XLA's thunks, and a kernel's machine code."""

import pytest

from sprl.planning import hlo, sass, thunks

TEXT = """HloModule small, is_scheduled=true

%written (p0: f32[8,100], p1: f32[8,1], p2: s32[]) -> f32[8,100] {
  %p0 = f32[8,100]{1,0} parameter(0)
  %p1 = f32[8,1]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = f32[8,100]{1,0} dynamic-update-slice(%p0, %p1, %zero, %p2)
}

%read (q0: bf16[1000,64], q1: s32[4]) -> f32[4,64] {
  %q0 = bf16[1000,64]{1,0} parameter(0)
  %q1 = s32[4]{0} parameter(1)
  %wide = f32[1000,64]{1,0} convert(%q0)
  ROOT %rows = f32[4,64]{1,0} gather(%wide, %q1), offset_dims={1}, slice_sizes={1,64}
}

%multiply (x: bf16[4,2,32], w0: bf16[512,64], w1: bf16[512,64]) -> f32[2,4,1024] {
  %x = bf16[4,2,32]{2,1,0} parameter(0)
  %w0 = bf16[512,64]{1,0} parameter(1)
  %w1 = bf16[512,64]{1,0} parameter(2)
  %both = bf16[1024,64]{1,0} concatenate(%w0, %w1), dimensions={0}
  %cut = bf16[1024,2,32]{2,1,0} reshape(%both)
  ROOT %dot = f32[2,4,1024]{2,1,0} dot(%x, %cut), lhs_batch_dims={1}, lhs_contracting_dims={2}
}

%body (arg: (s32[], bf16[512,64], /*index=2*/bf16[512,64], f32[8,100])) -> (s32[], bf16[512,64], bf16[512,64], f32[8,100]) {
  %arg = (s32[], bf16[512,64]{1,0}, /*index=2*/bf16[512,64]{1,0}, f32[8,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %w.0 = bf16[512,64]{1,0} get-tuple-element(%arg), index=1
  %w.1 = bf16[512,64]{1,0} get-tuple-element(%arg), index=2
  %cache = f32[8,100]{1,0} get-tuple-element(%arg), index=3
  %again = f32[512,64]{1,0} convert(%w.0)
  %tokens = bf16[4,2,32]{2,1,0} custom-call(%i), custom_call_target="tokens"
  %product = f32[2,4,1024]{2,1,0} fusion(%tokens, %w.0, %w.1), calls=%multiply, metadata={op_name="jit(f)/while/body/mlp/dot"}
  %new = f32[8,1]{1,0} custom-call(%product), custom_call_target="new"
  %stored = f32[8,100]{1,0} fusion(%cache, %new, %i), kind=kLoop, calls=%written
  ROOT %out = (s32[], bf16[512,64]{1,0}, bf16[512,64]{1,0}, f32[8,100]{1,0}) tuple(%i, %w.0, %w.1, %stored)
}

%more (a: (s32[])) -> pred[] {
  %a = (s32[]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (table: bf16[1000,64], ids: s32[4], start: s32[]) -> f32[4,64] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %ids = s32[4]{0} parameter(1)
  %start = s32[] parameter(2)
  %kept = (u8[16], u8[16]) custom-call(%table, %start), output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}
  %loop = (s32[]) while(%start), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"15"}}
  ROOT %result = f32[4,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%read
}
"""


def named(name):
  module = hlo.parse(TEXT)
  return module, module.instructions[name]


def test_shapes_operands_and_calls_are_read():
  module, loop = named('loop')
  assert module.entry.name == 'main'
  assert (loop.opcode, loop.operands, loop.body, loop.trip_count) == ('while', ('start',), 'body', 15)
  assert module.instructions['arg'].shapes[2] == hlo.Shape('bf16', (512, 64))
  assert module.instructions['product'].op_name.endswith('body/mlp/dot')
  assert module.instructions['product'].bytes == 4 * 2 * 4 * 1024


@pytest.mark.parametrize(('shape', 'size'), [('f8e4m3fn', 1), ('pred', 1), ('s32', 4), ('bf16', 2), ('u64', 8)])
def test_bytes_of_an_element(shape, size):
  assert hlo.Shape(shape, (3, 5)).bytes == 15 * size


def test_an_update_in_place_counts_what_it_writes():
  assert hlo.moved(*named('stored')) == hlo.Moved(read=4 * 8 + 4, written=4 * 8)


def test_a_gather_counts_the_rows_that_it_reads_through_a_conversion():
  assert hlo.moved(*named('result')) == hlo.Moved(read=2 * 4 * 64 + 4 * 4, written=4 * 4 * 64)


def test_memory_that_a_custom_call_updates_is_left_to_the_caller():
  assert hlo.moved(*named('kept')) == hlo.Moved(0, 0)
  assert named('kept')[1].aliased == ((0, 0), (1, 1))


def test_a_product_with_a_split_sum_is_read():
  module = hlo.parse(TEXT)
  found = hlo.product(module, module.instructions['dot'])
  assert found == hlo.Product(M=4, N=1024, K=32, batch=2)
  assert found.flops == 2 * 4 * 1024 * 64


def test_work_on_weights_in_a_loop_is_found():
  module = hlo.parse(TEXT)
  body = module.computations['body']
  assert hlo.invariant(body) == {'i', 'w.0', 'w.1'}
  ready = hlo.prepared(module, body, least=1024)
  assert [each.name for each in ready.launched] == ['again']
  assert [each.name for each in ready.fused] == ['both']


def test_a_text_without_a_program_is_refused():
  with pytest.raises(ValueError, match='found no ENTRY'):
    hlo.parse('HloModule nothing')


SEQUENCE = """001: kCopy  [source       | next=002 (1)] kCopy
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | next=006 (1)]
        004: kCustomKernel [source | next=005 (1)] add grid: [1, 1, 1]
        008: kConditional  [prev=004 (1) | sink]
          false_branch:
            005: kCustomCall [source | sink] kCustomCall
          true_branch:
            009: kCustomCall [source | sink] kCustomCall
    006: kWhile [prev=000 (1) | sink]
condition:
        007: kCustomKernel [source | sink] less grid: [1, 1, 1]
      body:
        010: kCustomKernel [source | sink] inner grid: [1, 1, 1]
    011: kCopy [source | sink] kCopy
"""
METADATA = '\n'.join(
  f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "t.{number}"\n    thunk_id: {number}\n  }}\n}}'
  for number in range(1, 12)
)


def test_thunks_are_a_tree_of_loops_branches_and_graphs():
  copy, loop = thunks.parse(SEQUENCE, METADATA)
  assert (copy.kind, copy.name, loop.name) == ('Copy', 't.1', 't.2')
  assert [thunk.name for thunk in loop.lists['condition']] == ['t.3']
  body = loop.lists['body']
  assert [thunk.kind for thunk in body] == ['CommandBuffer', 'While', 'Copy']
  branch = body[0].inside[1]
  assert {label: [thunk.name for thunk in each] for label, each in branch.lists.items()} == {
    'false_branch': ['t.5'],
    'true_branch': ['t.9'],
  }
  assert [thunk.name for thunk in body[1].lists['body']] == ['t.10']


def test_launches_of_a_plain_step_are_those_outside_of_loops_and_branches():
  body = thunks.parse(SEQUENCE, METADATA)[1].lists['body']
  assert [(thunk.name, graph) for thunk, graph in thunks.launches(body)] == [('t.4', True), ('t.7', False), ('t.11', False)]
  assert {thunk.name for thunk, _ in thunks.launches(body, nested=True)} == {'t.4', 't.5', 't.7', 't.9', 't.10', 't.11'}
  assert thunks.fragments(body) == (1, 2)
  assert [graph for _, graph in thunks.find(body, 'Conditional')] == [True]


CODE = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR17], R12 ;
        /*0020*/              @!P2 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   LDS R18, [R20+0x200] ;
        /*0040*/                   F2FP.F16.E4M3.UNPACK_B R5, R18 ;
        /*0050*/                   HGMMA.64x8x16.F32 R24, R4, gdesc[UR20], RZ ;
        /*0060*/                   NOP ;
        /*0070*/                   IADD3 R6, R6, 0x1, RZ ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
        /*0090*/                   STG.E [R2], R24 ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR17], R12 ;
        /*00c0*/              @!P2 BRA `(.L_x_3) ;
        /*00d0*/                   BRA `(.L_x_2) ;
"""


def test_the_multiplying_loop_is_counted_without_the_code_that_waits():
  found = sass.count(CODE)
  assert found.total['matrix'] == 1
  assert found.total['memory store'] == 1
  assert found.total['barrier'] == 2
  # The loop: one wait, a load, a conversion, a product, an addition, two branches, and the jump back from the waiting code.
  assert dict(found.loop) == {'barrier': 1, 'shared load': 1, 'conversion': 1, 'matrix': 1, 'other': 4}


def test_a_kernel_that_does_not_multiply_has_no_such_loop():
  assert not sass.count(
    '.L_x_1:\n  /*0000*/  IADD3 R6, R6, 0x1, RZ ;\n  /*0010*/  @P0 BRA `(.L_x_1) ;\n  /*0020*/  EXIT ;\n'
  ).loop
