/* The types Pool and Task: a pool of native threads and a batch that it makes, with the memory that both use.
 *
 * A Task holds what its images, their output and their status lie in until it is done; so nothing can be freed, closed
 * or resized below the threads. It has its own copy of everything that was checked.
 */
#include "module_batch.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#define SLICE_NS 50000000 /* of a wait: so often signals are looked at, such as Ctrl-C */

typedef struct {
  PyObject ob_base;
  pl_pool *pool;
} PoolObject;

typedef struct {
  PyObject ob_base;
  PoolObject *pool;
  pl_task *task;
  pl_held held;
} TaskObject;

/* ---- Pool -------------------------------------------------------------------------------------------------------- */

/* Return whether this process may use the pool; else set ValueError. */
static bool is_usable(const PoolObject *self) {
  if (pl_pool_is_mine(self->pool)) return true;
  PyErr_SetString(PyExc_ValueError, "the pool is another process's (make one after the fork)");
  return false;
}

static void *alloc(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  static char *names[] = {"threads", NULL};
  int num_threads;
  if (!PyArg_ParseTupleAndKeywords(args, named, "i:Pool", names, &num_threads)) return NULL;
  if (num_threads < 1 || num_threads > PL_MAX_THREADS)
    return PyErr_Format(PyExc_ValueError, "threads %d is not in 1 to %d", num_threads, PL_MAX_THREADS);
  PoolObject *self = alloc(type);
  if (self == NULL) return NULL;
  int error;
  self->pool = pl_pool_new(num_threads, &error);
  if (self->pool != NULL) return (PyObject *)self;
  Py_DECREF(self);
  errno = error;
  return PyErr_SetFromErrno(PyExc_OSError);
}

static void pool_dealloc(PyObject *object) {
  PoolObject *self = (PoolObject *)object;
  PyTypeObject *type = Py_TYPE(object);
  /* In a forked child its lock may be held by a thread that is not there, so its memory is left. */
  if (self->pool != NULL && pl_pool_is_mine(self->pool)) {
    Py_BEGIN_ALLOW_THREADS
    if (pl_pool_close(self->pool)) pl_pool_free(self->pool);
    Py_END_ALLOW_THREADS
  }
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* Queue what a method's arguments say; `task` frees what it has got, whatever becomes of this. */
static bool start(PoolObject *self, PyObject *args, PyObject *named, pl_read_arguments *read, TaskObject *task) {
  Py_ssize_t n = 0;
  pl_batch batch = {0};
  pl_image *images = read(args, named, &task->held, &n, &batch);
  if (images == NULL) return false;
  /* With the GIL: the threads hold the pool's lock for less than it takes to get the GIL back from a busy thread. */
  task->task = pl_pool_submit(self->pool, images, (size_t)n, &batch);
  if (task->task != NULL) return true;
  free(images);
  PyErr_SetString(PyExc_ValueError, "the pool is closed");
  return false;
}

static PyObject *new_task(PyObject *object, PyObject *args, PyObject *named, pl_read_arguments *read) {
  PoolObject *self = (PoolObject *)object;
  if (!is_usable(self)) return NULL;
  pl_state *state = PyType_GetModuleState(Py_TYPE(object));
  TaskObject *task = state != NULL ? alloc(state->task_type) : NULL;
  if (task == NULL) return NULL;
  task->pool = (PoolObject *)Py_NewRef(object);
  if (start(self, args, named, read, task)) return (PyObject *)task;
  Py_DECREF(task);
  return NULL;
}

static PyObject *pool_submit(PyObject *object, PyObject *args, PyObject *named) {
  return new_task(object, args, named, pl_read_records);
}

static PyObject *pool_submit_jpegs(PyObject *object, PyObject *args, PyObject *named) {
  return new_task(object, args, named, pl_read_files);
}

static PyObject *pool_measure(PyObject *object, PyObject *args, PyObject *named) {
  return new_task(object, args, named, pl_read_headers);
}

static PyObject *pool_close(PyObject *object, PyObject *unused) {
  (void)unused;
  PoolObject *self = (PoolObject *)object;
  if (!is_usable(self)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  (void)pl_pool_close(self->pool);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject *pool_scratch_bytes(PyObject *object, void *unused) {
  (void)unused;
  PoolObject *self = (PoolObject *)object;
  return is_usable(self) ? PyLong_FromSize_t(pl_pool_scratch_bytes(self->pool)) : NULL;
}

/* ---- Task -------------------------------------------------------------------------------------------------------- */

static void task_dealloc(PyObject *object) {
  TaskObject *self = (TaskObject *)object;
  PyTypeObject *type = Py_TYPE(object);
  bool is_freed = true;
  if (self->task != NULL && pl_pool_is_mine(self->pool->pool)) {
    Py_BEGIN_ALLOW_THREADS
    is_freed = pl_task_free(self->task);
    Py_END_ALLOW_THREADS
  } else if (self->task != NULL) {
    pl_task_forget(self->task);
  }
  if (is_freed) { /* else a thread that hangs may still write: what it uses is never given back */
    pl_release(&self->held);
    Py_XDECREF((PyObject *)self->pool);
  }
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* Return 1 where the task is done, 0 where not, -1 with an exception set where it never will be. */
static int look(TaskObject *self, int64_t timeout_ns) {
  pl_task_state state = pl_task_wait(self->task, 0);
  if (state == PL_RUNNING && timeout_ns > 0) {
    Py_BEGIN_ALLOW_THREADS
    state = pl_task_wait(self->task, timeout_ns);
    Py_END_ALLOW_THREADS
  }
  if (state == PL_RUNNING) return 0;
  pl_release(&self->held);
  if (state == PL_DONE) return 1;
  PyErr_SetString(PyExc_ValueError, "the pool was closed before the task was done");
  return -1;
}

static PyObject *task_wait(PyObject *object, PyObject *timeout) {
  TaskObject *self = (TaskObject *)object;
  double timeout_s = PyFloat_AsDouble(timeout);
  if (timeout_s == -1.0 && PyErr_Occurred()) return NULL;
  if (!is_usable(self->pool)) return NULL;
  if (isnan(timeout_s) || timeout_s < 0) return PyErr_Format(PyExc_ValueError, "timeout_s %R is no time", timeout);
  double left_ns = timeout_s < 9e9 ? timeout_s * 1e9 : 9e18; /* 285 years stand for ever */
  for (;;) {
    int64_t slice_ns = left_ns < SLICE_NS ? (int64_t)left_ns : SLICE_NS;
    int is_done = look(self, slice_ns);
    if (is_done < 0) return NULL;
    left_ns -= (double)slice_ns;
    if (is_done || left_ns < 1) return PyBool_FromLong(is_done); /* what is left of a nanosecond is no time */
    if (PyErr_CheckSignals()) return NULL;
  }
}

static PyObject *task_done(PyObject *object, void *unused) {
  (void)unused;
  TaskObject *self = (TaskObject *)object;
  int is_done = is_usable(self->pool) ? look(self, 0) : -1;
  return is_done < 0 ? NULL : PyBool_FromLong(is_done);
}

static PyObject *task_indexes(PyObject *object, PyObject *unused) {
  (void)unused;
  TaskObject *self = (TaskObject *)object;
  int is_done = is_usable(self->pool) ? look(self, 0) : -1;
  if (is_done < 0) return NULL;
  if (!is_done) return PyErr_Format(PyExc_ValueError, "the task is not done (wait for it)");
  Py_ssize_t n = (Py_ssize_t)pl_task_size(self->task);
  PyObject *indexes = PyList_New(n);
  for (Py_ssize_t i = 0; i < n && indexes != NULL; i++) {
    pl_entry entry = pl_task_entry(self->task, (size_t)i);
    PyObject *index = entry.bytes != NULL
                          ? PyBytes_FromStringAndSize((const char *)entry.bytes, (Py_ssize_t)entry.size)
                          : Py_NewRef(Py_None);
    if (index == NULL || PyList_SetItem(indexes, i, index)) Py_CLEAR(indexes);
  }
  return indexes;
}

static PyObject *task_seconds(PyObject *object, void *unused) {
  (void)unused;
  TaskObject *self = (TaskObject *)object;
  return is_usable(self->pool) ? PyFloat_FromDouble(1e-9 * (double)pl_task_busy_ns(self->task)) : NULL;
}

/* ---- the types ----------------------------------------------------------------------------------------------- */

#define NAMED(function) (PyCFunction)(void (*)(void))function, METH_VARARGS | METH_KEYWORDS

static PyMethodDef pool_methods[] = {
    {"submit", NAMED(pool_submit), "Queue a batch of crops of records."},
    {"submit_jpegs", NAMED(pool_submit_jpegs), "Queue a batch of crops of JPEG files."},
    {"measure", NAMED(pool_measure), "Queue reading the sizes of JPEG files."},
    {"close", pool_close, METH_NOARGS, "Leave out what has not begun, and join the threads."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef pool_values[] = {
    {"scratch_bytes", pool_scratch_bytes, NULL, "Bytes that the threads keep from image to image.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "Native threads that decode batches, images in order of submission."},
    {Py_tp_new, (void *)pool_new},
    {Py_tp_dealloc, (void *)pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_values},
    {0, NULL},
};
static PyType_Spec pool_spec = {.name = "paceline.data._native.Pool",
                                .basicsize = sizeof(PoolObject),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                .slots = pool_slots};

static PyMethodDef task_methods[] = {
    {"wait", task_wait, METH_O, "Wait at most so many seconds; return whether the task is done."},
    {"indexes", task_indexes, METH_NOARGS, "Return the new index entry of each image, or None."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef task_values[] = {
    {"seconds", task_seconds, NULL, "Seconds that the threads have spent on it, all together.", NULL},
    {"done", task_done, NULL, "Whether all its images are done.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot task_slots[] = {
    {Py_tp_doc, "A batch that a pool makes."},
    {Py_tp_dealloc, (void *)task_dealloc},
    {Py_tp_methods, task_methods},
    {Py_tp_getset, task_values},
    {0, NULL},
};
static PyType_Spec task_spec = {
    .name = "paceline.data._native.Task",
    .basicsize = sizeof(TaskObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = task_slots};

int pl_add_pool_types(PyObject *module, pl_state *state) {
  state->pool_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &pool_spec, NULL);
  state->task_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &task_spec, NULL);
  if (state->pool_type == NULL || state->task_type == NULL) return -1;
  return PyModule_AddType(module, state->pool_type) || PyModule_AddType(module, state->task_type) ? -1 : 0;
}
