/* Fuzz what makes records: the input is a JPEG file and NUM_PARAMETERS bytes; what is made must open and decode. */
#include <stdio.h>
#include <stdlib.h>

#include "check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < NUM_PARAMETERS) return 0;
  const uint8_t *parameters = data + size - NUM_PARAMETERS;
  int every = parameters[NUM_PARAMETERS - 1] > 0 ? parameters[NUM_PARAMETERS - 1] : 8;
  uint8_t *made = NULL;
  size_t made_bytes = 0;
  const char *why = pl_index_jpeg(data, size - NUM_PARAMETERS, every, &made, &made_bytes);
  if (why != NULL) return 0;
  pl_record record;
  pl_status status = pl_record_open(made, made_bytes, &record);
  if (status != PL_OK) {
    fprintf(stderr, "a record of our own does not open: %s\n", pl_reason(status));
    abort();
  }
  check_record(&record, parameters);
  free(made);
  return 0;
}
