// The CUDA runtime on a device made of host memory.
//
// Memory, copies, streams, events and captures are what CUDA says they are
// (https://docs.nvidia.com/cuda/cuda-runtime-api); kernels are not: `emulated_kernels.py` computes what torch asks for, and a kernel
// that gets here all the same is counted and does nothing. Two things are harsher than a GPU, so that a mistake shows:
//
// - memory that was never written holds NaN;
// - copies on a stream of its own are put off until somebody waits for them, so a host that reuses what it lent, or a
//   reader that does not wait, finds the wrong numbers.
//
// What a capture forbids fails here as there, and so does a capture whose streams were not joined.

#include <cuda_runtime_api.h>
#undef cudaStreamGetCaptureInfo

#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) cudaError_t
#define TOOL extern "C" __attribute__((visibility("default")))

namespace {

using Work = std::function<void()>;
struct Stream;
using Seen = std::map<Stream *, long>;  // how much of what each stream was asked for in a capture

struct Graph {
    std::vector<Work> nodes;
};

struct Capture {
    unsigned long long id;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    Stream *origin;
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    bool failed = false;
    Seen asked;
};

struct Stream {
    std::deque<Work> queue;
    long asked = 0, done = 0;
    std::recursive_mutex running;  // held by the thread that does its work
    Capture *capture = nullptr;
    Seen seen;
    int priority = 0;
};

struct Event {
    bool recorded = false;
    Stream *stream = nullptr;
    long place = 0;  // how much its stream had been asked for
    Capture *capture = nullptr;
    Seen seen;
    double at_ms = 0;
};

std::recursive_mutex mutex;
Stream first;  // the default stream, whose work is done at once
std::set<Stream *> streams;
std::set<Capture *> captures;
unsigned long long captures_so_far = 0;
thread_local cudaStreamCaptureMode own_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last = cudaSuccess;

std::map<char *, size_t> on_device, pinned;
size_t used = 0;
constexpr size_t MEMORY = size_t{16} << 30;
thread_local int current_device = 0;

int num_devices() {
    const char *asked = getenv("EMULATED_GPUS");
    return asked ? atoi(asked) : 1;
}

std::unordered_map<const void *, std::string> kernel_names;
std::map<std::string, long> ignored;
void (*replay)(long) = nullptr;

using Lock = std::lock_guard<std::recursive_mutex>;

Stream *stream_of(cudaStream_t stream) {
    return reinterpret_cast<size_t>(stream) <= 2 ? &first : reinterpret_cast<Stream *>(stream);
}

cudaError_t fail(cudaError_t error, const char *what) {
    last = error;
    fprintf(stderr, "emulated GPU: %s (error %d)\n", what, static_cast<int>(error));
    return error;
}

cudaError_t spoil(Capture *capture, cudaError_t error, const char *what) {
    capture->failed = true;
    return fail(error, what);
}

// What may end or wait for work is forbidden while this thread, or in mode global any thread, captures.
cudaError_t outside_captures(const char *what) {
    Lock lock(mutex);
    if (own_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    for (Capture *each : captures) {
        bool is_own = each->thread == std::this_thread::get_id();
        bool is_global = each->mode == cudaStreamCaptureModeGlobal && own_mode == cudaStreamCaptureModeGlobal;
        if (is_global || (is_own && each->mode != cudaStreamCaptureModeRelaxed))
            return spoil(each, cudaErrorStreamCaptureUnsupported, what);
    }
    return cudaSuccess;
}

// Do what a stream was asked for, up to a place in it. Work may wait for other processes, so no other lock is held.
void finish(Stream *stream, long place) {
    {
        Lock lock(mutex);
        if (stream->done >= place) return;
    }
    Lock runs(stream->running);
    while (true) {
        Work work;
        {
            Lock lock(mutex);
            if (stream->queue.empty() || stream->done >= place) return;
            work = std::move(stream->queue.front());
            stream->queue.pop_front();
        }
        work();
        Lock lock(mutex);
        ++stream->done;
    }
}

void finish(Stream *stream) {
    long place;
    {
        Lock lock(mutex);
        place = stream->asked;
    }
    finish(stream, place);
}

// Whether all up to a place is done; what is not is begun, unless another thread is at it.
bool is_done(Stream *stream, long place) {
    {
        Lock lock(mutex);
        if (stream->done >= place) return true;
    }
    std::unique_lock<std::recursive_mutex> runs(stream->running, std::try_to_lock);
    if (runs.owns_lock()) finish(stream, place);
    return false;
}

void finish_all() {
    std::vector<Stream *> all;
    {
        Lock lock(mutex);
        all.assign(streams.begin(), streams.end());
    }
    for (Stream *each : all) finish(each);
}

void ask(Stream *stream, Work work) {
    {
        Lock lock(mutex);
        if (stream->capture) {
            stream->capture->graph->nodes.push_back(std::move(work));
            stream->seen[stream] = ++stream->capture->asked[stream];
            return;
        }
        ++stream->asked;
        if (stream != &first) {
            stream->queue.push_back(std::move(work));
            return;
        }
    }
    work();
    Lock lock(mutex);
    ++stream->done;
}

bool holds(const std::map<char *, size_t> &ranges, const void *address) {
    Lock lock(mutex);
    char *at = static_cast<char *>(const_cast<void *>(address));
    auto next = ranges.upper_bound(at);
    if (next == ranges.begin()) return false;
    --next;
    return at < next->first + next->second;
}

bool is_pageable(const void *address) { return !holds(on_device, address) && !holds(pinned, address); }

cudaError_t take(void **address, size_t size, const char *what) {
    if (cudaError_t error = outside_captures(what)) return error;
    Lock lock(mutex);
    *address = nullptr;
    if (used + size > MEMORY || posix_memalign(address, 4096, size ? size : 1)) {
        last = cudaErrorMemoryAllocation;
        return last;
    }
    memset(*address, 0xFF, size);
    on_device[static_cast<char *>(*address)] = size;
    used += size;
    return cudaSuccess;
}

double now_ms() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

cudaStreamCaptureStatus status_of(Capture *capture) {
    if (!capture) return cudaStreamCaptureStatusNone;
    return capture->failed ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t ignore(const void *kernel) {
    Lock lock(mutex);
    auto found = kernel_names.find(kernel);
    ++ignored[found == kernel_names.end() ? "a kernel without a name" : found->second];
    return cudaSuccess;
}

}  // namespace

// What emulated_kernels.py asks for.

TOOL int emulated_captures(cudaStream_t stream) {
    Lock lock(mutex);
    return stream_of(stream)->capture != nullptr;
}
TOOL void emulated_finish(cudaStream_t stream) { finish(stream_of(stream)); }
TOOL void emulated_record(cudaStream_t stream, long number) {
    ask(stream_of(stream), [number] { replay(number); });
}
TOOL void emulated_replay_with(void (*function)(long)) { replay = function; }
TOOL long emulated_ignored() {
    Lock lock(mutex);
    long count = 0;
    for (auto &each : ignored) {
        fprintf(stderr, "emulated GPU: a kernel did nothing %ld times: %s\n", each.second, each.first.c_str());
        count += each.second;
    }
    return count;
}

// The device.

API cudaGetDeviceCount(int *count) { return *count = num_devices(), cudaSuccess; }
API cudaGetDevice(int *device) { return *device = current_device, cudaSuccess; }
API cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice, "there is no such device");
    current_device = device;
    return cudaSuccess;
}
API cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaGetDeviceProperties(cudaDeviceProp *is, int) {
    memset(is, 0, sizeof *is);
    strcpy(is->name, "Emulated GPU");
    is->totalGlobalMem = MEMORY;
    is->sharedMemPerBlock = 49152;
    is->sharedMemPerBlockOptin = 232448;
    is->sharedMemPerMultiprocessor = 233472;
    is->regsPerBlock = is->regsPerMultiprocessor = 65536;
    is->warpSize = 32;
    is->maxThreadsPerBlock = is->maxThreadsDim[0] = is->maxThreadsDim[1] = 1024;
    is->maxThreadsDim[2] = 64;
    is->maxGridSize[0] = 2147483647;
    is->maxGridSize[1] = is->maxGridSize[2] = 65535;
    is->major = 9;
    is->multiProcessorCount = 132;
    is->l2CacheSize = 62914560;
    is->memoryBusWidth = 6144;
    is->maxThreadsPerMultiProcessor = 2048;
    is->maxBlocksPerMultiProcessor = 32;
    is->concurrentKernels = is->unifiedAddressing = is->canMapHostMemory = is->cooperativeLaunch = 1;
    is->asyncEngineCount = 3;
    is->streamPrioritiesSupported = 1;
    memcpy(&is->uuid, "emulatedemulated", 16);
    return cudaSuccess;
}
API cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    cudaDeviceProp is;
    cudaGetDeviceProperties(&is, 0);
    const std::map<int, int> known = {
        {cudaDevAttrMaxThreadsPerBlock, is.maxThreadsPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlock, static_cast<int>(is.sharedMemPerBlock)},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(is.sharedMemPerBlockOptin)},
        {cudaDevAttrWarpSize, is.warpSize},
        {cudaDevAttrMultiProcessorCount, is.multiProcessorCount},
        {cudaDevAttrMaxThreadsPerMultiProcessor, is.maxThreadsPerMultiProcessor},
        {cudaDevAttrComputeCapabilityMajor, is.major},
        {cudaDevAttrClockRate, 1980000},
        {cudaDevAttrMemoryClockRate, 3201000},
        {cudaDevAttrGlobalMemoryBusWidth, is.memoryBusWidth},
    };
    auto found = known.find(attribute);
    *value = found == known.end() ? 0 : found->second;
    return cudaSuccess;
}
API cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
API cudaDeviceGetPCIBusId(char *id, int size, int) { return snprintf(id, size, "0000:19:00.0"), cudaSuccess; }
API cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
API cudaDeviceSynchronize() {
    cudaError_t error = outside_captures("cudaDeviceSynchronize during a capture");
    if (!error) finish_all();
    return error;
}
API cudaGetLastError() {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
API cudaPeekAtLastError() { return last; }
TOOL const char *cudaGetErrorName(cudaError_t) { return "cudaError"; }
TOOL const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        default: return "an error of the emulated GPU";
    }
}
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    std::swap(own_mode, *mode);
    return cudaSuccess;
}

// Memory.

API cudaMalloc(void **address, size_t size) { return take(address, size, "cudaMalloc during a capture"); }
API cudaFree(void *address) {
    if (!address) return cudaSuccess;
    if (cudaError_t error = outside_captures("cudaFree during a capture")) return error;
    finish_all();
    Lock lock(mutex);
    auto found = on_device.find(static_cast<char *>(address));
    if (found == on_device.end()) return fail(cudaErrorInvalidValue, "cudaFree of what was not taken");
    used -= found->second;
    on_device.erase(found);
    free(address);
    return cudaSuccess;
}
API cudaHostAlloc(void **address, size_t size, unsigned) {
    if (cudaError_t error = outside_captures("cudaHostAlloc during a capture")) return error;
    if (posix_memalign(address, 4096, size ? size : 1)) return cudaErrorMemoryAllocation;
    Lock lock(mutex);
    pinned[static_cast<char *>(*address)] = size;
    return cudaSuccess;
}
API cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }
API cudaHostRegister(void *address, size_t size, unsigned) {
    Lock lock(mutex);
    pinned[static_cast<char *>(address)] = size;
    return cudaSuccess;
}
API cudaHostUnregister(void *address) {
    Lock lock(mutex);
    pinned.erase(static_cast<char *>(address));
    return cudaSuccess;
}
API cudaFreeHost(void *address) {
    finish_all();
    cudaHostUnregister(address);
    free(address);
    return cudaSuccess;
}
API cudaPointerGetAttributes(cudaPointerAttributes *is, const void *address) {
    memset(is, 0, sizeof *is);
    is->type = holds(on_device, address) ? cudaMemoryTypeDevice
               : holds(pinned, address)  ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
    is->device = current_device;
    is->devicePointer = is->type == cudaMemoryTypeUnregistered ? nullptr : const_cast<void *>(address);
    is->hostPointer = is->type == cudaMemoryTypeDevice ? nullptr : const_cast<void *>(address);
    return cudaSuccess;
}
API cudaMemGetInfo(size_t *left, size_t *all) {
    if (left) *left = MEMORY - used;
    if (all) *all = MEMORY;
    return cudaSuccess;
}
API cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
    Stream *on = stream_of(stream);
    bool waits = is_pageable(to) || is_pageable(from);
    if (waits && on->capture)
        return spoil(on->capture, cudaErrorStreamCaptureUnsupported, "a copy of pageable memory during a capture");
    ask(on, [=] { memmove(to, from, size); });
    if (waits) finish(on);
    return cudaSuccess;
}
API cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) {
    cudaError_t error = outside_captures("cudaMemcpy during a capture");
    if (!error) memmove(to, from, size);
    return error;
}
API cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
API cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t height, cudaMemcpyKind kind,
    cudaStream_t stream) {
    for (size_t row = 0; row < height; ++row)
        if (cudaError_t error = cudaMemcpyAsync(
                static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * pitch, width, kind, stream))
            return error;
    return cudaSuccess;
}
API cudaMemset(void *to, int value, size_t size) { return memset(to, value, size), cudaSuccess; }
API cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    ask(stream_of(stream), [=] { memset(to, value, size); });
    return cudaSuccess;
}

// Streams.

API cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority) {
    auto *made = new Stream;
    made->priority = priority;
    Lock lock(mutex);
    streams.insert(made);
    *stream = reinterpret_cast<cudaStream_t>(made);
    return cudaSuccess;
}
API cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaStreamDestroy(cudaStream_t stream) { return finish(stream_of(stream)), cudaSuccess; }
API cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = stream_of(stream)->priority, cudaSuccess; }
API cudaStreamSynchronize(cudaStream_t stream) {
    Stream *on = stream_of(stream);
    if (on->capture) return spoil(on->capture, cudaErrorStreamCaptureUnsupported, "a capturing stream is waited for");
    if (on == &first)
        if (cudaError_t error = outside_captures("the default stream is waited for during a capture")) return error;
    finish(on);
    return cudaSuccess;
}
API cudaStreamQuery(cudaStream_t stream) {
    Stream *on = stream_of(stream);
    if (on->capture) return spoil(on->capture, cudaErrorStreamCaptureUnsupported, "a capturing stream is asked about");
    return is_done(on, on->asked) ? cudaSuccess : cudaErrorNotReady;
}
API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    Stream *on = stream_of(stream);
    auto *waited = reinterpret_cast<Event *>(event);
    {
        Lock lock(mutex);
        if (waited->capture && captures.count(waited->capture)) {
            if (on == &first) return spoil(waited->capture, cudaErrorStreamCaptureImplicit, "the default stream joins a capture");
            if (on->capture && on->capture != waited->capture)
                return spoil(on->capture, cudaErrorStreamCaptureMerge, "two captures are joined");
            if (!on->capture) on->seen.clear();
            on->capture = waited->capture;
            for (auto &each : waited->seen) on->seen[each.first] = std::max(on->seen[each.first], each.second);
            return cudaSuccess;
        }
        if (on->capture && waited->recorded)
            return spoil(on->capture, cudaErrorStreamCaptureIsolation, "a capturing stream waits for an event from outside");
    }
    Stream *other = waited->stream;
    long place = waited->place;
    if (other && other != on) ask(on, [=] { finish(other, place); });
    return cudaSuccess;
}
API cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned) {
    ask(stream_of(stream), [=] { function(stream, cudaSuccess, data); });
    return cudaSuccess;
}
API cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    ask(stream_of(stream), [=] { function(data); });
    return cudaSuccess;
}

// Events.

API cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}
API cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<Event *>(event), cudaSuccess; }
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Lock lock(mutex);
    auto *recorded = reinterpret_cast<Event *>(event);
    Stream *on = stream_of(stream);
    *recorded = Event{true, on->capture ? nullptr : on, on->asked, on->capture, on->seen, now_ms()};
    return cudaSuccess;
}
API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    bool is_of_the_graph = flags == cudaEventRecordExternal && stream_of(stream)->capture;
    return is_of_the_graph ? cudaSuccess : cudaEventRecord(event, stream);
}
static cudaError_t awaited(cudaEvent_t event, const char *what, bool finishes) {
    auto *asked = reinterpret_cast<Event *>(event);
    if (asked->capture && captures.count(asked->capture)) return spoil(asked->capture, cudaErrorCapturedEvent, what);
    if (cudaError_t error = outside_captures(what)) return error;
    if (!asked->stream) return cudaSuccess;
    if (!finishes) return is_done(asked->stream, asked->place) ? cudaSuccess : cudaErrorNotReady;
    finish(asked->stream, asked->place);
    return cudaSuccess;
}
API cudaEventSynchronize(cudaEvent_t event) { return awaited(event, "an event is waited for during a capture", true); }
API cudaEventQuery(cudaEvent_t event) { return awaited(event, "an event is asked about during a capture", false); }
API cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    auto *from = reinterpret_cast<Event *>(begin), *to = reinterpret_cast<Event *>(end);
    if (!from->recorded || !to->recorded) return fail(cudaErrorInvalidResourceHandle, "the time of an event not recorded");
    *ms = static_cast<float>(to->at_ms - from->at_ms);
    return cudaSuccess;
}

// Captures and graphs.

API cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    Lock lock(mutex);
    *status = status_of(stream_of(stream)->capture);
    return cudaSuccess;
}
API cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    Lock lock(mutex);
    Capture *capture = stream_of(stream)->capture;
    *status = status_of(capture);
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = capture ? reinterpret_cast<cudaGraph_t>(capture->graph.get()) : nullptr;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
}
API cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    Stream *on = stream_of(stream);
    if (on == &first) return fail(cudaErrorStreamCaptureImplicit, "the default stream cannot be captured");
    if (on->capture) return fail(cudaErrorIllegalState, "a stream is captured already");
    finish(on);
    Lock lock(mutex);
    on->capture = new Capture{++captures_so_far, mode, std::this_thread::get_id(), on};
    on->seen.clear();
    captures.insert(on->capture);
    return cudaSuccess;
}
API cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    Lock lock(mutex);
    Stream *on = stream_of(stream);
    Capture *capture = on->capture;
    *graph = nullptr;
    if (!capture) return fail(cudaErrorIllegalState, "a capture that has not begun ends");
    if (capture->origin != on) return fail(cudaErrorStreamCaptureUnmatched, "a capture ends on another stream");
    bool is_joined = true;
    for (auto &each : capture->asked) is_joined &= each.first == on || on->seen[each.first] >= each.second;
    for (Stream *each : streams)
        if (each->capture == capture) each->capture = nullptr;
    captures.erase(capture);
    if (capture->failed) return last = cudaErrorStreamCaptureInvalidated;
    if (!is_joined) return fail(cudaErrorStreamCaptureUnjoined, "a capture ends without a stream that it has asked");
    *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(capture->graph));
    return cudaSuccess;
}
API cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<Graph>(*reinterpret_cast<std::shared_ptr<Graph> *>(graph)));
    return cudaSuccess;
}
API cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(made, graph, flags);
}
API cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t stream) {
    auto graph = *reinterpret_cast<std::shared_ptr<Graph> *>(made);
    finish(stream_of(stream));
    for (Work &each : graph->nodes) each();
    return cudaSuccess;
}
API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
    *count = (*reinterpret_cast<std::shared_ptr<Graph> *>(graph))->nodes.size();
    return cudaSuccess;
}
API cudaGraphDestroy(cudaGraph_t graph) { return delete reinterpret_cast<std::shared_ptr<Graph> *>(graph), cudaSuccess; }
API cudaGraphExecDestroy(cudaGraphExec_t made) { return delete reinterpret_cast<std::shared_ptr<Graph> *>(made), cudaSuccess; }

// Kernels, none of which does anything.

TOOL void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}
TOOL void __cudaRegisterFunction(
    void **, const char *kernel, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {
    kernel_names[kernel] = name;
}
API __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}
API __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = *block = dim3{1, 1, 1};
    *shared = 0;
    *static_cast<void **>(stream) = nullptr;
    return cudaSuccess;
}
API cudaLaunchKernel(const void *kernel, dim3, dim3, void **, size_t, cudaStream_t) { return ignore(kernel); }
API __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **, size_t, cudaStream_t) { return ignore(kernel); }
API cudaLaunchCooperativeKernel(const void *kernel, dim3, dim3, void **, size_t, cudaStream_t) { return ignore(kernel); }
API cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *kernel, void **) { return ignore(kernel); }
API cudaFuncGetAttributes(cudaFuncAttributes *is, const void *) {
    memset(is, 0, sizeof *is);
    is->numRegs = 32;
    is->maxThreadsPerBlock = 1024;
    is->binaryVersion = is->ptxVersion = 90;
    return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int, size_t) { return *count = 2, cudaSuccess; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int, size_t, unsigned) {
    return *count = 2, cudaSuccess;
}
static int nothing() { return 0; }
API cudaGetDriverEntryPointByVersion(
    const char *, void **function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *found) {
    *function = reinterpret_cast<void *>(nothing);
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
