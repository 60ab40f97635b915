/* XXH64 with seed 0: a fast 64-bit checksum, against accidents and not against forgers. */
#ifndef PACELINE_XXH64_H
#define PACELINE_XXH64_H

#include <stddef.h>
#include <stdint.h>

uint64_t pl_xxh64(const uint8_t *bytes, size_t size);

#endif
