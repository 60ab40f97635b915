/* Memory that a thread keeps from image to image, so that decoding allocates nothing once it has seen large images. */
#include <stdlib.h>

#include "huffman.h"
#include "paceline.h"

#define ALIGNMENT 64 /* a cache line, and more than any vector here needs */

pl_scratch *pl_scratch_new(void) {
  pl_scratch *scratch = calloc(1, sizeof *scratch);
  if (scratch == NULL) return NULL;
  scratch->tables = pl_tables_new();
  if (scratch->tables == NULL) {
    free(scratch);
    return NULL;
  }
  return scratch;
}

void pl_scratch_free(pl_scratch *scratch) {
  if (scratch == NULL) return;
  free(scratch->coefficients.data);
  free(scratch->planes.data);
  free(scratch->rows.data);
  free(scratch->taps.data);
  free(scratch->columns.data);
  free(scratch->file.data);
  free(scratch->plain.data);
  free(scratch->record.data);
  pl_tables_free(scratch->tables);
  free(scratch);
}

size_t pl_scratch_bytes(const pl_scratch *scratch) {
  return sizeof *scratch + scratch->coefficients.size + scratch->planes.size + scratch->rows.size +
         scratch->taps.size + scratch->columns.size + scratch->file.size + scratch->plain.size +
         scratch->record.size + pl_tables_bytes(scratch->tables);
}

void *pl_reserve(pl_buffer *buffer, size_t size) {
  if (buffer->size >= size && buffer->data != NULL) return buffer->data;
  if (size > SIZE_MAX - ALIGNMENT) return NULL;
  size_t rounded = size == 0 ? ALIGNMENT : (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  void *data = aligned_alloc(ALIGNMENT, rounded);
  if (data == NULL) return NULL;
  free(buffer->data);
  buffer->data = data;
  buffer->size = rounded;
  return data;
}
