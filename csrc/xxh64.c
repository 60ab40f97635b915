/* XXH64 as its specification describes it (Y. Collet, "xxHash fast digest algorithm", version 0.2). */
#include "xxh64.h"

#include "bytes.h"

#define PRIME1 0x9E3779B185EBCA87u
#define PRIME2 0xC2B2AE3D27D4EB4Fu
#define PRIME3 0x165667B19E3779F9u
#define PRIME4 0x85EBCA77C2B2AE63u
#define PRIME5 0x27D4EB2F165667C5u
#define STRIPE_BYTES 32

static uint64_t rotated(uint64_t value, int n) { return value << n | value >> (64 - n); }

static uint64_t mixed(uint64_t accumulator, uint64_t lane) {
  return rotated(accumulator + lane * PRIME2, 31) * PRIME1;
}

static uint64_t merged(uint64_t sum, uint64_t accumulator) { return (sum ^ mixed(0, accumulator)) * PRIME1 + PRIME4; }

/* Return what whole stripes add up to, and leave the bytes behind them. */
static uint64_t sum_stripes(const uint8_t **bytes, size_t *left) {
  uint64_t a = PRIME1 + PRIME2, b = PRIME2, c = 0, d = 0 - PRIME1;
  for (; *left >= STRIPE_BYTES; *left -= STRIPE_BYTES, *bytes += STRIPE_BYTES) {
    a = mixed(a, pl_little64(*bytes));
    b = mixed(b, pl_little64(*bytes + 8));
    c = mixed(c, pl_little64(*bytes + 16));
    d = mixed(d, pl_little64(*bytes + 24));
  }
  uint64_t sum = rotated(a, 1) + rotated(b, 7) + rotated(c, 12) + rotated(d, 18);
  return merged(merged(merged(merged(sum, a), b), c), d);
}

uint64_t pl_xxh64(const uint8_t *bytes, size_t size) {
  size_t left = size;
  uint64_t sum = (size >= STRIPE_BYTES ? sum_stripes(&bytes, &left) : PRIME5) + size;
  for (; left >= 8; left -= 8, bytes += 8) sum = rotated(sum ^ mixed(0, pl_little64(bytes)), 27) * PRIME1 + PRIME4;
  if (left >= 4) {
    sum = rotated(sum ^ pl_little32(bytes) * PRIME1, 23) * PRIME2 + PRIME3;
    left -= 4;
    bytes += 4;
  }
  for (; left > 0; left--, bytes++) sum = rotated(sum ^ *bytes * PRIME5, 11) * PRIME1;
  sum = (sum ^ sum >> 33) * PRIME2;
  sum = (sum ^ sum >> 29) * PRIME3;
  return sum ^ sum >> 32;
}
