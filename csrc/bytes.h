/* Numbers in bytes, at any address and in either order; compilers make one instruction of each. */
#ifndef PACELINE_BYTES_H
#define PACELINE_BYTES_H

#include <stdint.h>

static inline uint32_t pl_little16(const uint8_t *bytes) { return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8; }

static inline uint32_t pl_little32(const uint8_t *bytes) { return pl_little16(bytes) | pl_little16(bytes + 2) << 16; }

static inline uint64_t pl_little64(const uint8_t *bytes) {
  return (uint64_t)pl_little32(bytes) | (uint64_t)pl_little32(bytes + 4) << 32;
}

static inline uint32_t pl_big16(const uint8_t *bytes) { return (uint32_t)bytes[0] << 8 | (uint32_t)bytes[1]; }

static inline uint32_t pl_big32(const uint8_t *bytes) { return pl_big16(bytes) << 16 | pl_big16(bytes + 2); }

static inline uint64_t pl_big64(const uint8_t *bytes) {
  return (uint64_t)bytes[0] << 56 | (uint64_t)bytes[1] << 48 | (uint64_t)bytes[2] << 40 | (uint64_t)bytes[3] << 32 |
         (uint64_t)bytes[4] << 24 | (uint64_t)bytes[5] << 16 | (uint64_t)bytes[6] << 8 | (uint64_t)bytes[7];
}

static inline void pl_put_little16(uint8_t *bytes, uint32_t value) {
  bytes[0] = (uint8_t)value;
  bytes[1] = (uint8_t)(value >> 8);
}

static inline void pl_put_little32(uint8_t *bytes, uint32_t value) {
  pl_put_little16(bytes, value);
  pl_put_little16(bytes + 2, value >> 16);
}

static inline void pl_put_little64(uint8_t *bytes, uint64_t value) {
  pl_put_little32(bytes, (uint32_t)value);
  pl_put_little32(bytes + 4, (uint32_t)(value >> 32));
}

#endif
