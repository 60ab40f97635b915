/* Reading bits, the first of a byte being its highest, from bytes that end: nothing beyond their tail is touched.
 *
 * The window holds the next bits from the top down. `count` of them are accounted for; those below may be right too,
 * and a refill then sets them to the same again. Offsets, not pointers, run past the end, so that the position stays
 * exact there and an overrun is seen afterwards instead of being tested for at every symbol.
 */
#ifndef PACELINE_BITS_H
#define PACELINE_BITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bytes.h"

#define PL_INLINE static inline __attribute__((always_inline)) /* so that it takes on its caller's instruction set */
#define PL_REFILLED 56 /* bits there are after a refill, at least */

typedef struct {
  uint64_t window;
  uint32_t count;
  size_t next;          /* offset of the byte that follows the accounted bits */
  const uint8_t *bytes;
  size_t size;          /* of the bytes that hold bits; PL_TAIL_BYTES more may be read */
} pl_bits;

/* Make the window whole. `guarded` only then may be false when the next PL_TAIL_BYTES bytes are there for certain. */
PL_INLINE void pl_bits_refill(pl_bits *bits, bool guarded) {
  size_t at = !guarded || bits->next < bits->size ? bits->next : bits->size;
  bits->window |= pl_big64(bits->bytes + at) >> bits->count;
  bits->next += (63 - bits->count) >> 3;
  bits->count |= PL_REFILLED;
}

/* Take `n` < 64 bits off, no more than are accounted for. */
PL_INLINE void pl_bits_take(pl_bits *bits, uint32_t n) {
  bits->window <<= n & 63;
  bits->count -= n;
}

/* Start at bit `position`, which is at most 8 x size. */
PL_INLINE pl_bits pl_bits_at(const uint8_t *bytes, size_t size, uint64_t position) {
  pl_bits bits = {.bytes = bytes, .size = size, .next = (size_t)(position >> 3)};
  pl_bits_refill(&bits, true);
  pl_bits_take(&bits, (uint32_t)(position & 7));
  return bits;
}

/* Return whether bits of `num_bytes` bytes can be taken off with unguarded refills. */
PL_INLINE bool pl_bits_hold(const pl_bits *bits, size_t num_bytes) {
  return bits->next < bits->size && bits->size - bits->next > num_bytes;
}

PL_INLINE uint64_t pl_bits_position(const pl_bits *bits) { return (uint64_t)bits->next * 8 - bits->count; }

PL_INLINE bool pl_bits_overran(const pl_bits *bits) { return pl_bits_position(bits) > (uint64_t)bits->size * 8; }

/* Return how many bits the magnitude of a number has, without leading zeros: JPEG's size of a value. */
PL_INLINE uint32_t pl_bits_of(int32_t value) {
  uint32_t magnitude = (uint32_t)(value < 0 ? -value : value);
  return magnitude == 0 ? 0 : 32 - (uint32_t)__builtin_clz(magnitude);
}

#endif
