/* Builds look-up tables from Huffman tables that may be wrong, and keeps those of the last few distinct sets. */
#include "huffman.h"

#include <stdlib.h>
#include <string.h>

#define MAX_SETS 8             /* most datasets have one to three; a set is 51 KB */
#define MAX_TABLE_BYTES (16 + 256)
#define MAX_SET_BYTES (4 * MAX_TABLE_BYTES)

typedef struct {
  uint8_t mask;
  size_t num_bytes;
  uint8_t bytes[MAX_SET_BYTES]; /* what it was built from */
  pl_code_set codes;
} cached_set;

struct pl_tables {
  int num_sets;
  cached_set *sets[MAX_SETS]; /* the last used first */
};

/* ---- one table --------------------------------------------------------------------------------------------------- */

size_t pl_table_extent(const uint8_t *table, size_t size) {
  if (size < 16) return 0;
  size_t num_values = 0;
  for (int i = 0; i < 16; i++) num_values += table[i];
  return num_values > 256 || num_values > size - 16 ? 0 : 16 + num_values;
}

/* Return the entry of a code of `length` bits. A value of more bits than samples of 8 bits need is no code here: the
 * reader counts on that, and libjpeg's own encoder refuses to write one. */
static uint32_t entry_of(uint32_t length, uint8_t symbol, bool is_ac) {
  uint32_t run = is_ac ? symbol >> 4 : 0;
  uint32_t size = is_ac ? symbol & 15 : symbol;
  if (size > (is_ac ? PL_MAX_AC_SIZE : PL_MAX_DC_SIZE)) return PL_ADVANCE_BAD << 16 | length << 8 | length;
  uint32_t advance = 0;
  if (is_ac) advance = size != 0 || run == 15 ? run + 1 : PL_ADVANCE_END;
  return size << 24 | advance << 16 | length << 8 | (length + size);
}

bool pl_codes_build(pl_codes *codes, const uint8_t *table, bool is_ac) {
  const uint8_t *values = table + 16;
  uint32_t code = 0, num_values = 0;
  memset(codes, 0, sizeof *codes);
  codes->is_ac = is_ac;
  for (uint32_t length = 1; length <= PL_MAX_CODE_BITS; length++) {
    codes->values_from[length] = (int32_t)num_values - (int32_t)code;
    for (int i = 0; i < table[length - 1]; i++, code++, num_values++) {
      // The last code of a length is left free (T.81, annex C): no code is of ones alone.
      if (num_values >= 256 || code + 1 >= 1u << length) return false;
      uint8_t symbol = values[num_values];
      if (!is_ac && symbol > 15) return false;
      codes->values[num_values] = symbol;
      if (length > PL_LOOK_BITS) continue;
      uint32_t entry = entry_of(length, symbol, is_ac), copies = 1u << (PL_LOOK_BITS - length);
      uint32_t *first = codes->entries + ((size_t)code << (PL_LOOK_BITS - length));
      for (uint32_t copy = 0; copy < copies; copy++) first[copy] = entry;
    }
    codes->limits[length] = code << (PL_MAX_CODE_BITS - length);
    code <<= 1;
  }
  return num_values > 0;
}

/* Return the symbol of a code of at least `shortest` bits. */
static int symbol_from(const pl_codes *codes, uint64_t window, uint32_t shortest, uint32_t *length) {
  uint32_t next = (uint32_t)(window >> (64 - PL_MAX_CODE_BITS));
  for (*length = shortest; *length <= PL_MAX_CODE_BITS; ++*length) {
    if (next >= codes->limits[*length]) continue;
    int32_t value = (int32_t)(next >> (PL_MAX_CODE_BITS - *length)) + codes->values_from[*length];
    return codes->values[value & 255];
  }
  *length = PL_MAX_CODE_BITS;
  return -1;
}

uint32_t pl_look_up_long(const pl_codes *codes, uint64_t window) {
  uint32_t length = 0;
  int symbol = symbol_from(codes, window, PL_LOOK_BITS + 1, &length);
  if (symbol < 0) return PL_ADVANCE_BAD << 16 | length << 8 | length;
  return entry_of(length, (uint8_t)symbol, codes->is_ac);
}

int pl_symbol(const pl_codes *codes, uint64_t window, uint32_t *length) {
  uint32_t entry = codes->entries[window >> (64 - PL_LOOK_BITS)];
  return symbol_from(codes, window, entry == 0 ? PL_LOOK_BITS + 1 : entry >> 8 & 0xff, length);
}

int pl_code_of(const uint8_t *table, uint8_t symbol, uint32_t *code) {
  uint32_t next = 0;
  const uint8_t *value = table + 16;
  for (int length = 1; length <= PL_MAX_CODE_BITS; length++, next <<= 1) {
    for (int i = 0; i < table[length - 1]; i++, next++) {
      if (*value++ != symbol) continue;
      *code = next;
      return length;
    }
  }
  return 0;
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static const uint32_t LARGE = PL_STEP_7_BITS | PL_STEP_9_BITS;

static uint32_t step_over(uint32_t entry) {
  uint32_t size = entry >> 24;
  return (entry & 63) | (size >= 7 ? PL_STEP_7_BITS : 0) | (size >= 9 ? PL_STEP_9_BITS : 0) | (entry >> 8 & 0xff00);
}

uint32_t pl_step_long(const pl_codes *codes, uint64_t window) { return step_over(pl_look_up(codes, window)); }

/* Write the steps of `num` runs of bits that begin with the same symbol, whose step is `first`, and go on with those
 * that `rest` has the steps of. */
static void join(uint32_t first, const uint16_t *rest, uint32_t num, uint16_t *made) {
  const uint16_t step = (uint16_t)first, furthest = (uint16_t)(63 - (first >> 8)); /* no further is in the block */
  for (uint32_t i = 0; i < num; i++) {
    const uint16_t joined = (uint16_t)((step + (rest[i] & ~LARGE)) | (rest[i] & LARGE));
    made[i] = (rest[i] >> 8 & 127) >= furthest ? step : joined;
  }
}

/* Write the steps of all `n` known bits that begin with the symbol that `known` begins with: those from `known` on.
 * `shorter` has the steps for fewer bits. Return how many there are. */
static uint32_t write_steps(const pl_codes *codes, uint32_t known, uint32_t n, const uint16_t *shorter,
                            uint16_t *made) {
  uint32_t entry = codes->entries[known << (PL_STEP_BITS - n) >> (PL_STEP_BITS - PL_LOOK_BITS)];
  uint32_t length = entry >> 8 & 0xff, first = step_over(entry), bits = first & 63, advance = first >> 8;
  if (entry == 0 || length > n) {
    made[known] = 0;
    return 1;
  }
  if (bits < n && advance < PL_ADVANCE_BAD) {
    uint32_t num = 1u << (n - bits);
    join(first, shorter + num, num, made + known);
    return num;
  }
  uint32_t num = 1u << (n - length);
  for (uint32_t i = 0; i < num; i++) made[known + i] = (uint16_t)(advance == PL_ADVANCE_BAD ? 0 : first);
  return num;
}

/* Build the steps for 1 known bit, then for 2, and so on: each is a symbol and a step for fewer bits. */
static void build_steps(const pl_codes *codes, uint16_t *steps) {
  uint16_t shorter[1 << PL_STEP_BITS]; // those for n bits begin at 1 << n
  for (uint32_t n = 1; n <= PL_STEP_BITS; n++) {
    uint16_t *made = n < PL_STEP_BITS ? shorter + (1 << n) : steps;
    for (uint32_t known = 0; known < 1u << n;) known += write_steps(codes, known, n, shorter, made);
  }
}

static void add_steps(pl_code_set *set, int mask) {
  for (int i = 0; i < 2; i++) {
    if ((mask >> (2 * i + 1) & 1) != 0) build_steps(&set->ac[i], set->steps[i]);
  }
  set->has_steps = true;
}

/* ---- sets of tables ---------------------------------------------------------------------------------------------- */

struct pl_tables *pl_tables_new(void) { return calloc(1, sizeof(struct pl_tables)); }

void pl_tables_free(struct pl_tables *tables) {
  if (tables == NULL) return;
  for (int i = 0; i < tables->num_sets; i++) free(tables->sets[i]);
  free(tables);
}

size_t pl_tables_bytes(const struct pl_tables *tables) {
  return sizeof *tables + (size_t)tables->num_sets * sizeof(cached_set);
}

/* Copied first: whoever changes a record meanwhile, a file that is mapped, changes nothing that was checked. */
static bool build_set(cached_set *set, const pl_record *record) {
  pl_codes *codes[4] = {&set->codes.dc[0], &set->codes.ac[0], &set->codes.dc[1], &set->codes.ac[1]};
  const uint8_t *table = set->bytes;
  size_t left = record->huffman_bytes;
  set->num_bytes = 0; // equal to none, should it fail half way
  set->codes.has_steps = false;
  if (left > sizeof set->bytes) return false;
  memcpy(set->bytes, record->huffman, left);
  for (int i = 0; i < 4; i++) {
    if ((record->huffman_mask >> i & 1) == 0) continue;
    size_t extent = pl_table_extent(table, left);
    if (extent == 0 || !pl_codes_build(codes[i], table, i % 2 == 1)) return false;
    table += extent;
    left -= extent;
  }
  if (left != 0) return false;
  set->mask = record->huffman_mask;
  set->num_bytes = record->huffman_bytes;
  return true;
}

static bool was_built_from(const cached_set *set, const pl_record *record) {
  return set->mask == record->huffman_mask && set->num_bytes == record->huffman_bytes &&
         memcmp(set->bytes, record->huffman, record->huffman_bytes) == 0;
}

pl_status pl_tables_for(struct pl_tables *tables, const pl_record *record, bool with_steps, const pl_code_set **set) {
  int at = 0;
  while (at < tables->num_sets && !was_built_from(tables->sets[at], record)) at++;
  bool is_new = at == tables->num_sets;
  if (is_new && at < MAX_SETS) {
    tables->sets[at] = malloc(sizeof(cached_set));
    if (tables->sets[at] == NULL) return PL_NO_MEMORY;
    tables->num_sets++;
  } else if (is_new) {
    at = MAX_SETS - 1; // the one longest unused makes room
  }
  cached_set *found = tables->sets[at];
  memmove(tables->sets + 1, tables->sets, (size_t)at * sizeof *tables->sets);
  tables->sets[0] = found;
  if (is_new && !build_set(found, record)) return PL_BAD_TABLES;
  if (with_steps && !found->codes.has_steps) add_steps(&found->codes, found->mask);
  *set = &found->codes;
  return PL_OK;
}
