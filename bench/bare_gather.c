// The floor that gathers are compared with: threads that copy random records of a lane to its window, both in huge
// pages, and do nothing else. A round is a lane. Usage: bare_gather THREADS LANES LANE_RECORDS RECORD_BYTES RECORDS
// ROUNDS   prints GB/s of all threads together
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { AHEAD = 16, HUGE_PAGE = 2 << 20 };

static size_t lanes, lane_records, record_bytes, records, rounds;
static uint8_t* source;
static pthread_barrier_t begin;

struct copier {
  pthread_t thread;
  uint64_t number;
  double began, ended;  // seconds
};

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint8_t* memory(size_t bytes) {
  uint8_t* at = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) exit(1);
  at = (uint8_t*)(((uintptr_t)at + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
  madvise(at, bytes, MADV_HUGEPAGE);
  memset(at, 1, bytes);
  return at;
}

static int by_value(const void* a, const void* b) {
  uint32_t x = *(const uint32_t*)a, y = *(const uint32_t*)b;
  return (x > y) - (x < y);
}

static void* gather(void* argument) {
  struct copier* self = argument;
  uint64_t state = 88172645463325252ull + self->number;
  uint8_t* windows = memory(lanes * records * record_bytes);
  uint32_t* wanted = malloc(rounds * records * sizeof *wanted);
  for (size_t i = 0; i < rounds * records; ++i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    wanted[i] = (uint32_t)(state % lane_records);
  }
  for (size_t round = 0; round < rounds; ++round) qsort(wanted + round * records, records, sizeof *wanted, by_value);
  pthread_barrier_wait(&begin);
  self->began = now();
  for (size_t round = 0; round < rounds; ++round) {
    const uint32_t* at = wanted + round * records;
    const size_t lane = round * 5 % lanes;
    const uint8_t* from = source + lane * lane_records * record_bytes;
    uint8_t* window = windows + lane * records * record_bytes;
    for (size_t i = 0; i < records; ++i) {
      const uint8_t* next = from + at[i + AHEAD < records ? i + AHEAD : i] * record_bytes;
      for (size_t line = 0; line < record_bytes; line += 64) __builtin_prefetch(next + line, 0, 3);
      memcpy(window + i * record_bytes, from + at[i] * record_bytes, record_bytes);
    }
    __asm__ volatile("" ::: "memory");
  }
  self->ended = now();
  return NULL;
}

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  size_t threads = strtoul(argv[1], NULL, 10);
  lanes = strtoul(argv[2], NULL, 10), lane_records = strtoul(argv[3], NULL, 10);
  record_bytes = strtoul(argv[4], NULL, 10), records = strtoul(argv[5], NULL, 10), rounds = strtoul(argv[6], NULL, 10);
  source = memory(lanes * lane_records * record_bytes);
  struct copier copiers[64] = {0};
  if (threads < 1 || threads > 64) return 2;
  pthread_barrier_init(&begin, NULL, (unsigned)threads);
  for (size_t i = 0; i < threads; ++i) {
    copiers[i].number = i;
    if (pthread_create(&copiers[i].thread, NULL, gather, &copiers[i]) != 0) return 1;
  }
  double began = 0, ended = 0;
  for (size_t i = 0; i < threads; ++i) {
    pthread_join(copiers[i].thread, NULL);
    if (i == 0 || copiers[i].began < began) began = copiers[i].began;
    if (copiers[i].ended > ended) ended = copiers[i].ended;
  }
  printf("%.3f\n", (double)(threads * rounds * records * record_bytes) / (ended - began) / 1e9);
  return 0;
}
