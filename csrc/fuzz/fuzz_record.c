/* Fuzz what reads records: the input is a record and NUM_PARAMETERS bytes that say what is asked of it. */
#include "check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < NUM_PARAMETERS) return 0;
  size_t record_bytes = size - NUM_PARAMETERS;
  pl_record record;
  if (pl_record_open(data, record_bytes, &record) == PL_OK) check_record(&record, data + record_bytes);
  return 0;
}
