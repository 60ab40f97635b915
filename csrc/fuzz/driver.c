/* A fuzzer without coverage, for where there is no libFuzzer: DRIVER SECONDS SEED FILE...
 *
 * Runs every file as it is, then mutated ones until the time is over: the same ones for the same seed. An input that
 * crashes is left in ./crash-input.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_BYTES (1 << 16)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct {
  uint8_t *data;
  size_t size;
} input;

static uint64_t state;

/* Return a random number below `limit` (xorshift64*, Vigna 2016, https://doi.org/10.1145/2845077). */
static size_t below(size_t limit) {
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return limit > 0 ? (size_t)((state * 2685821657736338717u >> 33) % limit) : 0;
}

static input read_file(const char *path) {
  input found = {malloc(MAX_BYTES), 0};
  FILE *file = fopen(path, "rb");
  if (file == NULL || found.data == NULL) {
    perror(path);
    exit(2);
  }
  found.size = fread(found.data, 1, MAX_BYTES, file);
  fclose(file);
  return found;
}

static void write_odd_number(uint8_t *at, size_t room) {
  static const uint32_t odd[] = {0,      1,      0x7f,   0x80,       0xff,       0x100,
                                 0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff};
  uint32_t number = odd[below(sizeof odd / sizeof *odd)];
  size_t width = (size_t)1 << below(3);
  memcpy(at, &number, width < room ? width : room); /* little-endian as records are, where the machine is */
}

/* Change a few bytes near one another: most damage that is told from none is done in the header. */
static void mutate(input *it, const input *other) {
  size_t at = below(2) ? below(it->size) : below(it->size < 700 ? it->size : 700), room = it->size - at;
  switch (below(7)) {
    case 0: it->data[at] ^= (uint8_t)(1 << below(8)); break;
    case 1: it->data[at] = (uint8_t)below(256); break;
    case 2: write_odd_number(it->data + at, room); break;
    case 3: it->data[at] = (uint8_t)(it->data[at] + below(35) - 17); break;
    case 4: it->size = at + 1; break;
    case 5: memmove(it->data + at, it->data + below(it->size - room + 1), room / 2); break;
    default:
      if (at < other->size)
        memcpy(it->data + at, other->data + at, below((room < other->size - at ? room : other->size - at) + 1));
  }
}

static const input *running;

static void keep_input(int number) {
  (void)number;
  FILE *file = fopen("crash-input", "wb");
  if (file != NULL) {
    fwrite(running->data, 1, running->size, file);
    fclose(file);
  }
  signal(SIGABRT, SIG_DFL);
  abort();
}

static void run(const input *it) {
  uint8_t *exact = malloc(it->size > 0 ? it->size : 1); /* so that a read beyond its end is found */
  if (exact == NULL) exit(2);
  memcpy(exact, it->data, it->size);
  running = it;
  (void)LLVMFuzzerTestOneInput(exact, it->size);
  free(exact);
}

int main(int argc, char **argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: %s SECONDS SEED FILE...\n", argv[0]);
    return 2;
  }
  signal(SIGABRT, keep_input);
  size_t num_files = (size_t)argc - 3, num_runs = 0;
  input *files = calloc(num_files, sizeof *files), work = {malloc(MAX_BYTES), 0};
  if (files == NULL || work.data == NULL) return 2;
  for (size_t i = 0; i < num_files; i++) {
    files[i] = read_file(argv[i + 3]);
    run(&files[i]);
  }
  state = strtoull(argv[2], NULL, 10) * 2862933555777941757u + 3037000493u;
  for (time_t end = time(NULL) + atol(argv[1]); time(NULL) < end; num_runs++) {
    const input *seed = &files[below(num_files)];
    memcpy(work.data, seed->data, work.size = seed->size);
    for (size_t times = 1 + below(4); times > 0 && work.size > 0; times--) mutate(&work, &files[below(num_files)]);
    run(&work);
  }
  for (size_t i = 0; i < num_files; i++) free(files[i].data);
  free(files);
  free(work.data);
  printf("%zu files, %zu mutated ones\n", num_files, num_runs);
  return 0;
}
