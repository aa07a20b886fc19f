// A SIMT machine on one CPU thread. Each GPU thread of a threadgroup is a fiber with its own stack. Fibers wait for
// each other at simdgroup operations and barriers, which record their source line. The machine runs the shaders as the
// shim compiles them. It reports errors that a GPU does not: operations that some lanes do not reach, unbound buffers,
// unset function constants. Sanitizers see ordinary memory: simt.cpp says what each of them adds.
#ifndef SIMT_H
#define SIMT_H
#include <stddef.h>
#include <stdint.h>
#include <string>

namespace simt
{

enum { simd_width = 32, max_buffers = 31, max_threadgroup_arguments = 8, max_constants = 40, max_threads = 1024 };

struct extent {
    unsigned x, y, z;
};

// One value per index of [[function_constant(index)]].
struct constant_values {
    bool set[max_constants];
    int64_t value[max_constants];
};

// The arguments of a kernel, and the thread's place in the grid.
struct thread_state {
    extent threadgroup_position_in_grid;
    unsigned thread_index_in_threadgroup, thread_index_in_simdgroup;
    unsigned simdgroup_index_in_threadgroup, simdgroups_per_threadgroup;
    void *const *buffers;
    void *const *threadgroup_arguments;
};

// A kernel registers itself at start-up. Each mask has one bit per index that the kernel's arguments name.
struct kernel {
    const char *name;
    uint32_t buffers, threadgroup;
    uint64_t constants;
    void (*body)(thread_state &);
    const kernel *next;
};
struct registration {
    kernel k;
    registration(const char *name, uint32_t buffers, uint32_t threadgroup, uint64_t constants,
                 void (*body)(thread_state &));
};
const kernel *first_kernel();
const kernel *find_kernel(const char *name); // NULL if there is none

struct launch {
    extent threadgroups, threads;                        // per grid, per threadgroup
    void *buffers[max_buffers];                          // NULL: not bound
    size_t threadgroup_bytes[max_threadgroup_arguments]; // 0: not bound
    constant_values constants;
};

enum lane_order { ascending, descending, shuffled };
struct schedule {
    lane_order order;
    uint64_t seed;         // of the shuffled order
    unsigned char poison;  // every byte of threadgroup memory before the kernel writes it
    bool flush_subnormals; // a GPU may do so
};

// Runs every threadgroup of the grid. Returns an empty string, or what was wrong; the output is undefined then.
std::string run(const kernel &k, const launch &l, const schedule &s);
// The number of halves that lanes have converted to floats since the program started.
uint64_t widened_halves();

// Below: for the shim only.
struct slot {
    alignas(16) unsigned char bytes[16];
};
extern thread_state *current;
extern const constant_values *constants;
// Posts a value, waits for the other lanes of the simdgroup, returns the 32 posted values.
const slot *exchange(const void *value, size_t size, const char *operation, const char *file, int line);
// Of a lane's part of an 8x8 matrix: element 0; element 1 is beside it. The order of Apple's GPUs;
// a test may change it.
struct matrix_place {
    unsigned row, column;
};
extern matrix_place matrix_places[simd_width];
// The lane that holds elements 2 i and 2 i + 1 of a row, in the launch that runs.
extern unsigned char matrix_lanes[8][4];
enum barrier_scope { simdgroup_scope, threadgroup_scope };
void barrier(barrier_scope scope, bool orders_memory, const char *file, int line);
void count_half();
[[noreturn]] void unset_constant(const char *name, int index);
[[noreturn]] void bad_lane(const char *operation, unsigned lane, const char *file, int line);

// A function constant. It reads the value of the launch.
template <class T>
struct function_constant {
    int index;
    const char *name;
    operator T() const
    {
        if (!constants->set[index]) unset_constant(name, index);
        return T(constants->value[index]);
    }
};

} // namespace simt
#endif
