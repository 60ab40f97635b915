// NCCL for the ranks of one machine, over memory that their processes share.
//
// An operation is work of its stream, as NCCL's is (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api), and
// waits there for the other ranks. Numbers are added in the order of the ranks, in double, and rounded once.

#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) ncclResult_t
#define TOOL extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t SLOT = size_t{1} << 20;
constexpr int MOST_RANKS = 16;

struct Board {  // what all ranks of a communicator see; a new one is all zeros
    std::atomic<int> arrived, turn;
    std::atomic<int> full[MOST_RANKS][MOST_RANKS];  // bytes from one rank to another
    int said[MOST_RANKS][2];
    alignas(64) char slots[MOST_RANKS][SLOT];
    alignas(64) char letters[MOST_RANKS][MOST_RANKS][SLOT / MOST_RANKS];
};

}  // namespace

struct ncclComm {
    std::string name;
    int rank, size, splits = 0;
    Board *board;
    std::atomic<bool> aborted{false};
    std::map<int, double> factors;
};

namespace {

struct Letter {
    ncclComm *comm;
    bool sends;
    char *data;
    size_t left;
    int peer;
};

thread_local int groups = 0;
thread_local std::vector<Letter> letters;
thread_local cudaStream_t letters_on = nullptr;

void rest() { usleep(20); }

bool meet(ncclComm *comm) {
    Board *board = comm->board;
    int turn = board->turn.load();
    if (board->arrived.fetch_add(1) + 1 == comm->size) {
        board->arrived.store(0);
        board->turn.store(turn + 1);
        return true;
    }
    while (board->turn.load() == turn) {
        if (comm->aborted) return false;
        rest();
    }
    return true;
}

size_t width_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        default: return 4;
    }
}

double half(unsigned short bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 31 ? (fraction ? NAN : INFINITY)
                   : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                  : std::ldexp(fraction, -24);
    return bits >> 15 ? -value : value;
}

unsigned short to_half(double value) {
    unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    double size = std::fabs(value);
    if (std::isnan(value)) return 0x7E00;
    if (size >= 65520) return sign | 0x7C00;
    int exponent = size > 0 ? std::max(std::ilogb(size), -14) : -14;
    long fraction = std::lrint(std::ldexp(size, 10 - exponent));  // with the leading one, where there is one
    return sign | static_cast<unsigned short>(((exponent + 14) << 10) + fraction);
}

double read(const char *at, ncclDataType_t type) {
    auto as = [at](auto value) { return memcpy(&value, at, sizeof value), value; };
    switch (type) {
        case ncclInt8: return as(static_cast<signed char>(0));
        case ncclUint8: return as(static_cast<unsigned char>(0));
        case ncclInt32: return as(0);
        case ncclUint32: return as(0u);
        case ncclInt64: return static_cast<double>(as(0LL));
        case ncclUint64: return static_cast<double>(as(0ULL));
        case ncclFloat16: return half(as(static_cast<unsigned short>(0)));
        case ncclFloat64: return as(0.0);
        case ncclBfloat16: {
            unsigned bits = unsigned{as(static_cast<unsigned short>(0))} << 16;
            float value;
            memcpy(&value, &bits, 4);
            return value;
        }
        default: return as(0.0f);
    }
}

void write(char *at, ncclDataType_t type, double value) {
    auto as = [at](auto number) { memcpy(at, &number, sizeof number); };
    switch (type) {
        case ncclInt8: return as(static_cast<signed char>(value));
        case ncclUint8: return as(static_cast<unsigned char>(value));
        case ncclInt32: return as(static_cast<int>(value));
        case ncclUint32: return as(static_cast<unsigned>(value));
        case ncclInt64: return as(static_cast<long long>(value));
        case ncclUint64: return as(static_cast<unsigned long long>(value));
        case ncclFloat16: return as(to_half(value));
        case ncclFloat64: return as(value);
        case ncclBfloat16: {
            float narrow = static_cast<float>(value);
            unsigned bits;
            memcpy(&bits, &narrow, 4);
            if (std::isnan(narrow)) return as(static_cast<unsigned short>(0x7FC0));
            return as(static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16));
        }
        default: return as(static_cast<float>(value));
    }
}

// Fill `to` with what `bytes` in the slots of all ranks come to.
void reduce(ncclComm *comm, char *to, size_t bytes, ncclDataType_t type, ncclRedOp_t op) {
    size_t width = width_of(type);
    auto factor = comm->factors.find(op);
    for (size_t at = 0; at < bytes; at += width) {
        double total = 0;
        long long whole = 0;  // of 64-bit integers, which a double would round
        for (int rank = 0; rank < comm->size; ++rank) {
            const char *from = comm->board->slots[rank] + at;
            double value = read(from, type);
            if (factor != comm->factors.end()) value *= factor->second;
            long long exact = 0;
            if (type == ncclInt64) memcpy(&exact, from, 8);
            if (!rank) total = value, whole = exact;
            else if (op == ncclProd) total *= value, whole *= exact;
            else if (op == ncclMax) total = std::max(total, value), whole = std::max(whole, exact);
            else if (op == ncclMin) total = std::min(total, value), whole = std::min(whole, exact);
            else total += value, whole += exact;
        }
        if (type == ncclInt64 && op != ncclAvg) memcpy(to + at, &whole, 8);
        else write(to + at, type, op == ncclAvg ? total / comm->size : total);
    }
}

void on(cudaStream_t stream, std::function<void()> work) {
    auto *kept = new std::function<void()>(std::move(work));  // a graph calls it again and again
    cudaLaunchHostFunc(stream, [](void *each) { (*static_cast<std::function<void()> *>(each))(); }, kept);
}

using Put = std::function<void(size_t, size_t)>;

// In pieces: each rank puts its own into its slot, and when all have, takes what it needs.
void exchange(ncclComm *comm, cudaStream_t stream, size_t bytes, Put put, Put take) {
    on(stream, [=] {
        for (size_t at = 0; at < bytes; at += SLOT) {
            size_t size = std::min(SLOT, bytes - at);
            put(at, size);
            if (!meet(comm)) return;
            take(at, size);
            if (!meet(comm)) return;
        }
    });
}

void deliver(std::vector<Letter> pending) {
    while (!pending.empty()) {
        bool moved = false;
        for (Letter &each : pending) {
            if (each.comm->aborted) return;
            int from = each.sends ? each.comm->rank : each.peer, to = each.sends ? each.peer : each.comm->rank;
            char *letter = each.comm->board->letters[from][to];
            std::atomic<int> &full = each.comm->board->full[from][to];
            size_t size = std::min(each.left, SLOT / MOST_RANKS);
            if (!each.left || (full.load() != 0) == each.sends) continue;
            each.sends ? memcpy(letter, each.data, size) : memcpy(each.data, letter, size);
            full.store(each.sends ? 1 : 0);
            each.data += size;
            each.left -= size;
            moved = true;
        }
        pending.erase(std::remove_if(pending.begin(), pending.end(), [](Letter &each) { return !each.left; }), pending.end());
        if (!moved) rest();
    }
}

ncclComm *join(const std::string &name, int rank, int size) {
    if (size > MOST_RANKS) return nullptr;
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Board))) return nullptr;
    void *board = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (board == MAP_FAILED) return nullptr;
    auto *comm = new ncclComm;
    comm->name = name;
    comm->rank = rank;
    comm->size = size;
    comm->board = static_cast<Board *>(board);
    meet(comm);
    if (!rank) shm_unlink(name.c_str());  // all have it open
    return comm;
}

char *bytes_of(const void *data) { return static_cast<char *>(const_cast<void *>(data)); }

}  // namespace

API ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
TOOL const char *ncclGetErrorString(ncclResult_t) { return "emulated NCCL"; }
TOOL const char *ncclGetLastError(ncclComm_t) { return ""; }
API ncclGetUniqueId(ncclUniqueId *id) {
    std::random_device random;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/emulated-nccl-%08x%08x", random(), random());
    return ncclSuccess;
}
API ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *) {
    *comm = join(id.internal, rank, size);
    return *comm ? ncclSuccess : ncclSystemError;
}
API ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
API ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int, ncclUniqueId *ids, ncclConfig_t *) {
    return ncclCommInitRankConfig(comm, size, ids[0], rank, nullptr);
}
API ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *) {
    int *own = comm->board->said[comm->rank];
    own[0] = color;
    own[1] = key;
    if (!meet(comm)) return ncclRemoteError;
    int rank = 0, size = 0;
    for (int each = 0; each < comm->size; ++each) {
        const int *said = comm->board->said[each];
        if (said[0] != color) continue;
        ++size;
        rank += said[1] < key || (said[1] == key && each < comm->rank);
    }
    if (!meet(comm)) return ncclRemoteError;
    std::string name = comm->name + "-" + std::to_string(++comm->splits) + "-" + std::to_string(color);
    *made = color == NCCL_SPLIT_NOCOLOR ? nullptr : join(name, rank, size);
    return ncclSuccess;
}
API ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
API ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
API ncclCommAbort(ncclComm_t comm) { return comm->aborted = true, ncclSuccess; }
API ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) { return *error = ncclSuccess, ncclSuccess; }
API ncclCommCount(const ncclComm_t comm, int *count) { return *count = comm->size, ncclSuccess; }
API ncclCommUserRank(const ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }
API ncclMemAlloc(void **address, size_t size) { return cudaMalloc(address, size) ? ncclSystemError : ncclSuccess; }
API ncclMemFree(void *address) { return cudaFree(address) ? ncclSystemError : ncclSuccess; }
API ncclRedOpCreatePreMulSum(
    ncclRedOp_t *op, void *factor, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t comm) {
    int number = ncclNumOps + static_cast<int>(comm->factors.size()) + 1;
    comm->factors[number] = read(bytes_of(factor), type);
    return *op = static_cast<ncclRedOp_t>(number), ncclSuccess;
}
API ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

API ncclAllReduce(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    auto put = [=](size_t at, size_t size) { memcpy(comm->board->slots[comm->rank], bytes_of(from) + at, size); };
    auto take = [=](size_t at, size_t size) { reduce(comm, bytes_of(to) + at, size, type, op); };
    return exchange(comm, stream, count * width_of(type), put, take), ncclSuccess;
}
API ncclReduce(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
    cudaStream_t stream) {
    auto put = [=](size_t at, size_t size) { memcpy(comm->board->slots[comm->rank], bytes_of(from) + at, size); };
    auto take = [=](size_t at, size_t size) {
        if (comm->rank == root) reduce(comm, bytes_of(to) + at, size, type, op);
    };
    return exchange(comm, stream, count * width_of(type), put, take), ncclSuccess;
}
API ncclBroadcast(
    const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    auto put = [=](size_t at, size_t size) {
        if (comm->rank == root) memcpy(comm->board->slots[root], bytes_of(from) + at, size);
    };
    auto take = [=](size_t at, size_t size) { memcpy(bytes_of(to) + at, comm->board->slots[root], size); };
    return exchange(comm, stream, count * width_of(type), put, take), ncclSuccess;
}
API ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}
API ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * width_of(type);
    auto put = [=](size_t at, size_t size) { memcpy(comm->board->slots[comm->rank], bytes_of(from) + at, size); };
    auto take = [=](size_t at, size_t size) {
        for (int rank = 0; rank < comm->size; ++rank)
            memcpy(bytes_of(to) + rank * bytes + at, comm->board->slots[rank], size);
    };
    return exchange(comm, stream, bytes, put, take), ncclSuccess;
}
API ncclGather(
    const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * width_of(type);
    auto put = [=](size_t at, size_t size) { memcpy(comm->board->slots[comm->rank], bytes_of(from) + at, size); };
    auto take = [=](size_t at, size_t size) {
        for (int rank = 0; comm->rank == root && rank < comm->size; ++rank)
            memcpy(bytes_of(to) + rank * bytes + at, comm->board->slots[rank], size);
    };
    return exchange(comm, stream, bytes, put, take), ncclSuccess;
}
API ncclReduceScatter(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * width_of(type);
    for (int owner = 0; owner < comm->size; ++owner) {
        auto put = [=](size_t at, size_t size) {
            memcpy(comm->board->slots[comm->rank], bytes_of(from) + owner * bytes + at, size);
        };
        auto take = [=](size_t at, size_t size) {
            if (comm->rank == owner) reduce(comm, bytes_of(to) + at, size, type, op);
        };
        exchange(comm, stream, bytes, put, take);
    }
    return ncclSuccess;
}

static ncclResult_t post(Letter letter, cudaStream_t stream) {
    letters.push_back(letter);
    letters_on = stream;
    if (!groups) {
        on(stream, [pending = letters] { deliver(pending); });
        letters.clear();
    }
    return ncclSuccess;
}
API ncclSend(const void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return post(Letter{comm, true, bytes_of(data), count * width_of(type), peer}, stream);
}
API ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return post(Letter{comm, false, bytes_of(data), count * width_of(type), peer}, stream);
}
API ncclGroupStart() { return ++groups, ncclSuccess; }
API ncclGroupEnd() {
    if (--groups || letters.empty()) return ncclSuccess;
    on(letters_on, [pending = letters] { deliver(pending); });
    letters.clear();
    return ncclSuccess;
}
