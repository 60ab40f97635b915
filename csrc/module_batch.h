/* From the arguments of Pool's methods to batches. */
#ifndef PACELINE_MODULE_BATCH_H
#define PACELINE_MODULE_BATCH_H

#include "binding.h"

#include "pool.h"

/* Memory of other objects that is held. */
typedef struct {
  Py_buffer *views;
  Py_ssize_t num_views;
} pl_held;

void pl_release(pl_held *held);

/* Read a method's arguments: return its images, from malloc, and set `*n`, `*batch` and `*held`, which must be released
 * either way. NULL with an exception set where something is wrong. */
typedef pl_image *pl_read_arguments(PyObject *args, PyObject *named, pl_held *held, Py_ssize_t *n, pl_batch *batch);

pl_read_arguments pl_read_records; /* of Pool.submit */
pl_read_arguments pl_read_files;   /* of Pool.submit_jpegs */
pl_read_arguments pl_read_headers; /* of Pool.measure */

#endif
