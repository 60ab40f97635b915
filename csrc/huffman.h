/* Huffman codes of a JPEG (ITU T.81, annex C and F.2.2.3) as look-up tables, and the sets of them a thread has met. */
#ifndef PACELINE_HUFFMAN_H
#define PACELINE_HUFFMAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bits.h"
#include "paceline.h"

#define PL_LOOK_BITS 11      /* codes up to this length are found by one look-up; measured: 10 and 12 are no faster */
#define PL_MAX_DC_SIZE 11    /* bits of a DC difference of 8-bit samples */
#define PL_MAX_AC_SIZE 10    /* bits of an AC coefficient; two symbols of 16 + 10 bits fit between refills */
#define PL_MAX_CODE_BITS 16

/* An entry tells all about a symbol: bits 0..7: of code and value together; 8..15: of the code alone; 16..23: how far
 * to advance in the block; 24..31: bits of the value. 0: the code is longer than PL_LOOK_BITS.
 *
 * The sum of AC advances ends a block when it reaches 63. They are such that then its bit 6 is set if and only if the
 * block was wrong: a run beyond its end, or a code that there is none of. That of a DC is 0, or has this bit. */
#define PL_ADVANCE_END 128
#define PL_ADVANCE_BAD 64

typedef struct {
  uint32_t entries[1 << PL_LOOK_BITS];
  uint32_t limits[PL_MAX_CODE_BITS + 1]; /* by length: the first 16 bits that no code so short begins */
  int32_t values_from[PL_MAX_CODE_BITS + 1]; /* by length: index of the value of code 0 */
  uint8_t values[256];
  bool is_ac;
} pl_codes;

/* Read the table of 16 counts and the values they count at `table`, of at most `size` bytes. Return how many bytes
 * that is, or 0 where it does not fit, or counts more than 256 values. */
size_t pl_table_extent(const uint8_t *table, size_t size);

/* Build the look-up table of such a table. Return false where no JPEG may have it: more codes than there is room for,
 * a code of ones alone, a DC difference of more than 15 bits. */
bool pl_codes_build(pl_codes *codes, const uint8_t *table, bool is_ac);

/* Return the number of bits of the code of `symbol` and set `*code`, or return 0 where it has none. */
int pl_code_of(const uint8_t *table, uint8_t symbol, uint32_t *code);

/* Return the symbol of the code that `window` begins with and set the code's `*length`, or return -1 where there is
 * none: for those to whom symbols mean other things than entries say. */
int pl_symbol(const pl_codes *codes, uint64_t window, uint32_t *length);

/* Return the entry of the code that `window` begins with, one longer than PL_LOOK_BITS or none at all. */
uint32_t pl_look_up_long(const pl_codes *codes, uint64_t window);

PL_INLINE uint32_t pl_look_up(const pl_codes *codes, uint64_t window) {
  uint32_t entry = codes->entries[window >> (64 - PL_LOOK_BITS)];
  if (__builtin_expect(entry == 0, 0)) entry = pl_look_up_long(codes, window);
  return entry;
}

/* To pass over a block, no values are needed: a step passes over all AC symbols whose codes lie in the next
 * PL_STEP_BITS 12bits, which are two in most photographs. Bits 0..5 of a step: of their codes and values together, at
 * most 26; bits 6 and 7: whether a value has 7 bits or more, and 9 or more; bits 8..15: how far to advance in the
 * block. 0: there is no step here, but a code that is longer. */
#define PL_STEP_BITS 12 /* measured: 11 and 13 are slower */
#define PL_STEP_7_BITS 64
#define PL_STEP_9_BITS 128

/* The four tables an image may have; those its record does not name are not built. */
typedef struct {
  pl_codes dc[2], ac[2];
  bool has_steps;
  uint16_t steps[2][1 << PL_STEP_BITS]; /* of the AC codes */
} pl_code_set;

/* Return the step over the one symbol that `window` begins with. */
uint32_t pl_step_long(const pl_codes *codes, uint64_t window);

struct pl_tables *pl_tables_new(void);
void pl_tables_free(struct pl_tables *tables);
size_t pl_tables_bytes(const struct pl_tables *tables);

/* Set `*set` to the look-up tables of a record, built or as built before for the same bytes. Only `with_steps` are the
 * steps there for certain. */
pl_status pl_tables_for(struct pl_tables *tables, const pl_record *record, bool with_steps, const pl_code_set **set);

#endif
