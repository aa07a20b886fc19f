#include "tests/metal/sizes.h"
#include "pipelines.h"
#include <algorithm>
#include <map>
#include <string.h>
#include <unistd.h>

enum { PAIR_BYTES = 64 << 10, MOST_SHARED_BYTES = 227 << 10 }; // of a threadgroup

// As in the shim.
struct simt_arguments {
    void *buffers[DEVICE_BUFFERS];
    uint32_t threadgroup_offsets[8];
    uint64_t values[2][32];
};
static_assert(sizeof(tqkv__attend_args) <= sizeof simt_arguments::values[0], "argument structs travel with the launch");

std::string cuda_pipeline_name(const device_dispatch &d)
{
    const std::string prefix = "tqkv_";
    std::string name = std::string(d.kernel).substr(prefix.size());
    for (int i = 0; i < TQKV__CONSTANTS; i++)
        name += (i ? "_" : "-") + (d.constant_set[i] ? std::to_string(d.constants[i]) : std::string("x"));
    return name;
}

const void *cuda_pipeline(const std::string &folder, const std::string &name, std::string *error)
{
    static std::map<std::string, cudaKernel_t> loaded;
    auto found = loaded.find(name);
    if (found != loaded.end()) return (const void *)found->second;
    cudaLibrary_t library;
    cudaKernel_t kernel;
    const std::string path = folder + "/" + name + ".cubin", entry = "simt_run_tqkv_" + name.substr(0, name.find('-'));
    if (access(path.c_str(), R_OK) != 0) { // compute-sanitizer reports a failed call as an error
        *error = "tqkv_" + name + ": no such pipeline";
        return nullptr;
    }
    cudaError_t result = cudaLibraryLoadFromFile(&library, path.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result == cudaSuccess) result = cudaLibraryGetKernel(&kernel, library, entry.c_str());
    if (result == cudaSuccess && (name.find("attend_matrix") == 0 || name.find("index_scores") == 0))
        result =
            cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED_BYTES);
    if (result != cudaSuccess) {
        *error = "tqkv_" + name + ": " + cudaGetErrorString(result);
        return nullptr;
    }
    loaded[name] = kernel;
    return (const void *)kernel;
}

static size_t aligned(size_t size) { return (size + 15) / 16 * 16; }

// Of attend_matrix memory 0 is cut to the codebooks that it has: three threadgroups fit on a multiprocessor then. The
// shim's table of pairs lies behind them.
static size_t table_bytes(const device_dispatch &d, bool values_too)
{
    const uint32_t formats[] = {d.constants[TQKV_FC_FORMAT], d.constants[TQKV_FC_VALUE_FORMAT],
                                d.constants[TQKV_FC_TAIL_FORMAT]};
    const bool pairs = std::any_of(formats, formats + 3, [](uint32_t f) {
        return TQKV__KIND(f) == TQKV__BOOK && TQKV__MAIN_BITS(f) == 4 && TQKV__UPPER_BITS(f) == 0;
    });
    const int values = values_too ? std::max(1 << TQKV__BOOK_BITS(formats[1]), 4) : 0;
    return TQKV__TABLE_BYTES + (size_t)values * sizeof(float) + (pairs ? PAIR_BYTES : 0);
}

// The shim's weights of long rows, behind those that every machine has: one set for each norm of a row.
static size_t more_weights(const device_dispatch &d)
{
    const int format = (int)d.constants[TQKV_FC_VALUE_FORMAT], columns = (int)d.constants[TQKV_FC_COLUMNS];
    const bool sets = strstr(d.kernel, "attend_matrix_d512") && TQKV__KIND(format) == TQKV__BOOK;
    return sets ? TQKV__LONG_WEIGHT_BYTES(TQKV__MATRICES(columns)) : 0;
}

static size_t memory_bytes(const device_dispatch &d, int i)
{
    if (i == 1) return aligned(d.threadgroup_bytes[1] + more_weights(d));
    const bool attend = strstr(d.kernel, "attend_matrix"), index = strstr(d.kernel, "index_scores");
    return aligned(i == 0 && (attend || index) ? table_bytes(d, attend) : d.threadgroup_bytes[i]);
}

size_t cuda_shared_bytes(const device_dispatch &d)
{
    size_t size = 0;
    for (int i = 0; i < DEVICE_MEMORIES; i++) size += memory_bytes(d, i);
    return size;
}

cudaError_t cuda_launch(const void *kernel, const device_dispatch &d, void *const *buffers, cudaStream_t stream)
{
    simt_arguments arguments = {};
    size_t offset = 0;
    for (int i = 0; i < DEVICE_MEMORIES; i++) {
        arguments.threadgroup_offsets[i] = (uint32_t)offset;
        offset += memory_bytes(d, i);
    }
    for (int i = 0; i < DEVICE_BUFFERS; i++) {
        if (d.by_value[i])
            memcpy(arguments.values[i / TQKV__SECOND_ARGS], d.buffers[i], d.buffer_sizes[i]);
        else
            arguments.buffers[i] = d.buffer_sizes[i] ? buffers[i] : nullptr;
    }
    void *parameters[] = {&arguments};
    return cudaLaunchKernel(kernel, dim3(d.threadgroups[0], d.threadgroups[1], d.threadgroups[2]), dim3(d.threads),
                            parameters, cuda_shared_bytes(d), stream);
}
