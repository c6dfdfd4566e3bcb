"""Memory for chunks: handed out again when, and only when, no tensor uses it any more."""

import gc
import random

import torch

from diloco_protocol.tensors.codecs import as_bytes
from diloco_protocol.tensors.tensor_pool import SMALLEST, TensorPool

ELEMENTS = SMALLEST // 4


def places(pool: TensorPool, count: int) -> set[int]:
    """Where the next tensors lie, all of them kept until the last is made."""
    taken = [pool.take(ELEMENTS, torch.float32) for _ in range(count)]
    return {each.data_ptr() for each in taken}


def test_view_or_frame_that_is_still_read_keeps_its_memory() -> None:
    pool = TensorPool()
    for keep in (lambda t: t[3:5], as_bytes, lambda t: t.view(torch.uint8).numpy()):
        tensor = pool.take(ELEMENTS, torch.float32).fill_(1.5)
        place, kept = tensor.data_ptr(), keep(tensor)
        del tensor
        gc.collect()
        assert place not in places(pool, 10)
        del kept
        assert place in places(pool, 10)


def test_each_dtype_and_length_is_as_asked() -> None:
    pool = TensorPool()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for elements in (0, 1, ELEMENTS, 2 * ELEMENTS + 1):
            tensor = pool.take(elements, dtype)
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (elements,))


def test_memory_of_every_length_is_used_again_in_any_order() -> None:
    """Random lengths, taken and let go: no two in use overlap, and what is mapped stays bounded."""
    dice, pool = random.Random(3), TensorPool()
    kept: list[tuple[int, torch.Tensor]] = []
    for number in range(2000):
        elements = ELEMENTS * dice.choice((1, 2, 4))
        kept.append((number, pool.take(elements, torch.float32).fill_(number)))
        while len(kept) > 8 or (kept and dice.random() < 0.4):
            filled, tensor = kept.pop(dice.randrange(len(kept)))
            assert tensor.eq(filled).all()
            del tensor
    assert pool.mapped_bytes <= 3 * 8 * 4 * SMALLEST


def test_pieces_of_half_the_size_become_one() -> None:
    """Chunks in bf16, when they are free, and then one in fp32."""
    pool = TensorPool()
    halves = [pool.take(2 * ELEMENTS, torch.bfloat16) for _ in range(4)]
    mapped = pool.mapped_bytes
    del halves
    wholes = [pool.take(2 * ELEMENTS, torch.float32).fill_(number) for number in range(2)]
    assert pool.mapped_bytes == mapped
    assert [float(each.mean()) for each in wholes] == [0.0, 1.0]


def test_buffer_in_use_during_a_release_is_used_again_afterwards() -> None:
    pool = TensorPool()
    tensor = pool.take(ELEMENTS, torch.float32)
    pool.release()
    mapped = pool.mapped_bytes
    del tensor
    pool.take(ELEMENTS, torch.float32)
    assert pool.mapped_bytes == mapped


def test_small_buffers_are_left_to_the_allocator() -> None:
    pool = TensorPool()
    pool.take(10, torch.float32)
    assert pool.mapped_bytes == 0
