#include "parallel/communicator.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "base/error.h"
#include "parallel/communicator_kinds.h"
#include "parallel/link_speed.h"
#include "test/catch.h"
#include "test/kernels/test_device.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

#ifdef TRAIN_GPT_CUDA
#include <filesystem>

#include <dlfcn.h>

#include "device/cuda.h"
#include "device/nvidia_library.h"
#endif

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// Element i of what a rank contributes: of very different magnitudes and both signs; integers are
/// small. All ranks compute the same values.
template <class T>
T value(uint64_t seed, int rank, int64_t i) {
    uint64_t x = seed + 0x9e3779b97f4a7c15u *
                            (static_cast<uint64_t>(rank) * 1000003u + static_cast<uint64_t>(i) + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    if constexpr (std::is_same_v<T, int32_t>) {
        return static_cast<int32_t>(x % 2000001) - 1000000;
    } else {
        const double unit = static_cast<double>(x >> 12) * 0x1p-52 - 0.5;
        return static_cast<T>(static_cast<float>(unit * static_cast<double>(1u << (x % 16))));
    }
}

double number(bf16 x) { return static_cast<float>(x); }
template <class T>
double number(T x) {
    return static_cast<double>(x);
}

/// The sum of element i as the contract for CPUs requires: by rank within each node, then by node;
/// bf16 is summed in fp32 and rounded once.
template <class T>
T sum_in_order(uint64_t seed, const std::vector<std::vector<int>>& nodes, int64_t i) {
    using Sum = std::conditional_t<std::is_same_v<T, bf16>, float, T>;
    std::optional<Sum> total;
    for (const std::vector<int>& ranks : nodes) {
        std::optional<Sum> sum;
        for (const int r : ranks) {
            const Sum x = static_cast<Sum>(value<T>(seed, r, i));
            sum = sum ? *sum + x : x;
        }
        total = total ? *total + *sum : *sum;
    }
    return static_cast<T>(*total);
}

/// Whether a sum is as near to the float64 sum as it must be if every addition rounds in T (bf16
/// may also be rounded to bf16 each time).
template <class T>
bool is_near_sum(T sum, uint64_t seed, int ranks, int64_t i) {
    double exact = 0, magnitude = 0;
    for (int r = 0; r < ranks; ++r) {
        exact += number(value<T>(seed, r, i));
        magnitude += std::abs(number(value<T>(seed, r, i)));
    }
    const double rounding = std::is_same_v<T, float>    ? 0x1p-24
                            : std::is_same_v<T, bf16>   ? 0x1p-8
                            : std::is_same_v<T, double> ? 0x1p-52
                                                        : 0;
    return std::abs(number(sum) - exact) <= ranks * rounding * magnitude;
}

template <class T>
bool same_bits(T a, T b) {
    using Bytes = std::array<std::byte, sizeof(T)>;
    return std::bit_cast<Bytes>(a) == std::bit_cast<Bytes>(b);
}

/// A poisoned buffer on the device under test, with a few elements after its end that must stay
/// poisoned.
template <class T>
class Buffer {
  public:
    explicit Buffer(int64_t n) : n_(n), memory_(static_cast<size_t>(n + guards) * sizeof(T)) {}
    T* data() const { return static_cast<T*>(memory_.data()); }
    T& operator[](int64_t i) const { return data()[i]; }
    bool is_intact() const {
        const auto* bytes = reinterpret_cast<const unsigned char*>(data() + n_);
        return std::all_of(bytes, bytes + guards * sizeof(T),
                           [](unsigned char byte) { return byte == 0xff; });
    }

  private:
    static constexpr int64_t guards = 16;
    int64_t n_;
    TestMemory memory_;
};

struct Group {
    Communicator& ranks;
    Stream& stream;
    Activity& activity;
    std::vector<std::vector<int>> nodes;  // on CPUs; on GPUs, NCCL chooses the order of sums
    bool has_cpus = true;

    int rank() const { return ranks.rank(); }
    int size() const { return ranks.size(); }
};

/// Fills n elements with this rank's values. Of blocks of `count` elements, one for each rank,
/// element i of block b is element b·count + i.
template <class T>
void fill(const Group& g, const Buffer<T>& buffer, uint64_t seed, int64_t n) {
    for (int64_t i = 0; i < n; ++i) buffer[i] = value<T>(seed, g.rank(), i);
}

template <class T>
bool is_right_sum(const Group& g, T sum, uint64_t seed, int64_t i) {
    return g.has_cpus ? same_bits(sum, sum_in_order<T>(seed, g.nodes, i))
                      : is_near_sum(sum, seed, g.size(), i);
}

template <class T>
void check_sums(const Group& g, int64_t count) {
    const DType dtype = dtype_of<T>;
    const int n = g.size();
    const uint64_t seed = test_rng()();
    INFO(name_of(dtype) << ", " << count << " elements, rank " << g.rank() << " of " << n);
    const auto volume = static_cast<int64_t>(sizeof(T)) * count * (n - 1);
    const bool has_formula =
        g.nodes.size() <=
        1;  // between nodes, bf16 travels as fp32, and ranks of small nodes send more

    // reduce_scatter, out of place and in place
    const Buffer<T> all(n * count), own(count), in_place(n * count), gathered(n * count),
        reduced(n * count);
    const int64_t first = g.rank() * count;
    int64_t wrong = 0;
    fill(g, all, seed, n * count);
    fill(g, in_place, seed, n * count);
    fill(g, reduced, seed, n * count);
    int64_t sent = g.ranks.bytes_sent();
    g.ranks.reduce_scatter(g.stream, own.data(), all.data(), count, dtype);
    if (has_formula) CHECK(g.ranks.bytes_sent() - sent == volume);
    g.ranks.reduce_scatter(g.stream, in_place.data() + first, in_place.data(), count, dtype);
    g.stream.synchronize();
    for (int64_t i = 0; i < count; ++i) {
        wrong += !is_right_sum(g, own[i], seed, first + i);
        wrong += !is_near_sum(own[i], seed, n, first + i);
        wrong += !same_bits(own[i], in_place[first + i]);
    }
    CHECK(wrong == 0);
    CHECK((all.is_intact() && own.is_intact() && in_place.is_intact()));

    // all_gather of the sums, and all_reduce, which gives the same bits on CPUs
    sent = g.ranks.bytes_sent();
    g.ranks.all_gather(g.stream, gathered.data(), own.data(), count, dtype);
    if (has_formula) CHECK(g.ranks.bytes_sent() - sent == volume);
    g.ranks.all_gather(g.stream, in_place.data(), in_place.data() + first, count, dtype);
    sent = g.ranks.bytes_sent();
    g.ranks.all_reduce(g.stream, reduced.data(), n * count, dtype);
    if (has_formula) CHECK(g.ranks.bytes_sent() - sent == 2 * volume);
    g.stream.synchronize();
    wrong = 0;
    for (int64_t i = 0; i < n * count; ++i) {
        wrong += !is_right_sum(g, reduced[i], seed, i);
        wrong += g.has_cpus ? !same_bits(reduced[i], gathered[i])
                            : !is_near_sum(gathered[i], seed, n, i);
        wrong += !same_bits(in_place[i], gathered[i]);
    }
    CHECK(wrong == 0);
    CHECK((gathered.is_intact() && in_place.is_intact() && reduced.is_intact()));

    // The largest value of all ranks
    const Buffer<T> largest(n * count);
    fill(g, largest, seed, n * count);
    g.ranks.all_reduce(g.stream, largest.data(), n * count, dtype, Reduction::max);
    g.stream.synchronize();
    wrong = 0;
    for (int64_t i = 0; i < n * count; ++i) {
        double expected = number(value<T>(seed, 0, i));
        for (int r = 1; r < n; ++r) expected = std::max(expected, number(value<T>(seed, r, i)));
        wrong += number(largest[i]) != expected;
    }
    CHECK(wrong == 0);
    CHECK(largest.is_intact());

    // A count that the number of ranks does not divide.
    const int64_t odd = n * count - 1;
    if (odd > 0) {
        const Buffer<T> sums(odd);
        fill(g, sums, seed, odd);
        g.ranks.all_reduce(g.stream, sums.data(), odd, dtype);
        g.stream.synchronize();
        wrong = 0;
        for (int64_t i = 0; i < odd; ++i)
            wrong += !same_bits(sums[i], reduced[i]) &&
                     (g.has_cpus || !is_near_sum(sums[i], seed, n, i));
        CHECK(wrong == 0);
        CHECK(sums.is_intact());
    }
}

template <class T>
void check_copies(const Group& g, int64_t count) {
    const DType dtype = dtype_of<T>;
    const int n = g.size();
    const uint64_t seed = test_rng()();
    INFO(name_of(dtype) << ", " << count << " elements, rank " << g.rank() << " of " << n);

    // broadcast
    const int root = static_cast<int>(random_int(0, n - 1));
    const Buffer<T> data(count);
    fill(g, data, seed, count);
    g.ranks.broadcast(g.stream, data.data(), count, dtype, root);

    // A ring: even ranks send first.
    const int next = (g.rank() + 1) % n, previous = (g.rank() + n - 1) % n;
    const Buffer<T> passed(count), arrived(count);
    fill(g, passed, seed, count);
    if (n > 1) {
        if (g.rank() % 2 == 0) g.ranks.send(g.stream, passed.data(), count, dtype, next);
        g.ranks.receive(g.stream, arrived.data(), count, dtype, previous);
        if (g.rank() % 2 == 1) g.ranks.send(g.stream, passed.data(), count, dtype, next);
    }
    g.stream.synchronize();
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; ++i) {
        wrong += !same_bits(data[i], value<T>(seed, root, i));
        wrong += n > 1 && !same_bits(arrived[i], value<T>(seed, previous, i));
    }
    CHECK(wrong == 0);
    CHECK((data.is_intact() && arrived.is_intact()));
    g.ranks.check();
}

/// Every rank sends each other one up to three messages of any sizes, also empty ones.
template <class T>
void check_all_to_all(const Group& g, int64_t most) {
    INFO(name_of(dtype_of<T>) << ", up to " << most << " elements, rank " << g.rank() << " of "
                              << g.size());
    std::vector<std::unique_ptr<Buffer<T>>> buffers;
    std::vector<Communicator::Transfer> sends, receives;
    std::vector<uint64_t> seeds;  // of what arrives
    int64_t sent = 0;
    for (int from = 0; from < g.size(); ++from)
        for (int to = 0; to < g.size(); ++to)
            for (int64_t message = from == to ? 0 : random_int(0, 3); message > 0; --message) {
                // The same on all ranks
                const int64_t count = random_int(0, 2) == 0 ? 0 : random_int(1, most);
                const uint64_t of_message = test_rng()();
                if (g.rank() != from && g.rank() != to) continue;
                const Buffer<T>& data = *buffers.emplace_back(std::make_unique<Buffer<T>>(count));
                if (g.rank() == from) {
                    fill(g, data, of_message, count);
                    sends.push_back({to, data.data(), count});
                    sent += count * static_cast<int64_t>(sizeof(T));
                } else {
                    receives.push_back({from, data.data(), count});
                    seeds.push_back(of_message);
                }
            }
    const int64_t before = g.ranks.bytes_sent();
    g.ranks.all_to_all(g.stream, sends, receives, dtype_of<T>);
    g.stream.synchronize();
    CHECK(g.ranks.bytes_sent() - before == sent);
    int64_t wrong = 0;
    for (size_t r = 0; r < receives.size(); ++r)
        for (int64_t i = 0; i < receives[r].count; ++i)
            wrong += !same_bits(static_cast<const T*>(receives[r].data)[i],
                                value<T>(seeds[r], receives[r].rank, i));
    CHECK(wrong == 0);
    for (const auto& buffer : buffers) CHECK(buffer->is_intact());
    g.ranks.check();
}

template <class T>
void check_collectives(const Group& g, int64_t count) {
    check_sums<T>(g, count);
    check_copies<T>(g, count);
    check_all_to_all<T>(g, count);
}

/// After a barrier, everything is visible that any rank did before it.
void check_barrier(const Group& g, const std::string& path) {
    const int file = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0600);
    REQUIRE(file >= 0);
    for (int turn = 1; turn <= 10; ++turn) {
        CHECK(::write(file, "x", 1) == 1);
        g.ranks.barrier(g.stream);
        g.stream.synchronize();
        CHECK(::lseek(file, 0, SEEK_END) >= turn * g.size());
    }
    ::close(file);
}

/// Counts around the sizes that may matter: one element, a cache line, and on CPUs more than two
/// slots of the shared memory.
void check_group(const Group& g, const std::string& barrier_file) {
    const int64_t entered = g.activity.collectives;
    for (const int64_t count :
         {int64_t{1}, int64_t{3}, random_int(60, 70), random_int(500, 2000)}) {
        check_collectives<float>(g, count);
        check_collectives<bf16>(g, count);
        check_collectives<int32_t>(g, count);
        check_collectives<double>(g, count);
    }
    if (g.has_cpus && g.size() > 1)
        check_collectives<double>(g, 300000 / g.size() + random_int(0, 1000));
    CHECK(g.activity.collectives > entered);
    check_barrier(g, barrier_file);
    CHECK(std::string(g.activity.collective) == "barrier");
}

/// Splits the group into parts with the order of ranks reversed, and splits a part again. Returns
/// what this rank sent in its part.
int64_t check_split(const Group& g) {
    const int color = g.rank() % 2;
    const std::unique_ptr<Communicator> part = g.ranks.split(color, -g.rank(), 0);
    const int members = (g.size() - color + 1) / 2;
    REQUIRE(part->size() == members);
    CHECK(part->rank() == members - 1 - g.rank() / 2);

    const Buffer<int32_t> numbers(part->size());
    numbers[part->rank()] = g.rank();
    part->all_gather(g.stream, numbers.data(), numbers.data() + part->rank(), 1, DType::int32);
    g.stream.synchronize();
    for (int r = 0; r < part->size(); ++r) CHECK(numbers[r] == color + 2 * (members - 1 - r));
    CHECK(numbers.is_intact());

    const std::unique_ptr<Communicator> alone = part->split(part->rank(), 0, 0);
    REQUIRE(alone->size() == 1);
    const Buffer<float> from(5), to(5);
    for (int i = 0; i < 5; ++i) from[i] = static_cast<float>(i + g.rank());
    alone->reduce_scatter(g.stream, to.data(), from.data(), 5, DType::fp32);
    g.stream.synchronize();
    for (int i = 0; i < 5; ++i) CHECK(to[i] == static_cast<float>(i + g.rank()));
    CHECK_THROWS_AS(alone->send(g.stream, from.data(), 5, DType::fp32, 0), Error);
    return part->bytes_sent();
}

/// The groups of ranks that give the same number, by rank; groups are ordered by their first ranks.
std::vector<std::vector<int>> nodes_of(const std::vector<int>& numbers) {
    std::vector<std::vector<int>> nodes;
    for (size_t r = 0; r < numbers.size(); ++r) {
        const auto same = std::ranges::find_if(nodes, [&](const auto& ranks) {
            return numbers[static_cast<size_t>(ranks[0])] == numbers[r];
        });
        if (same == nodes.end()) {
            nodes.push_back({static_cast<int>(r)});
        } else {
            same->push_back(static_cast<int>(r));
        }
    }
    return nodes;
}

std::string barrier_file(const World& world, const std::string& name) {
    return std::string(std::getenv("FOLDER")) + "-" + name + std::to_string(world.size());
}

/// Launchers whose ranks exchange data through MPI, if there is one, and over TCP.
std::vector<Launcher> kinds_of_links() {
    std::vector<Launcher> kinds{Launcher::own};
    if (usual_launcher() == Launcher::mpirun) kinds.push_back(Launcher::mpirun);
    return kinds;
}

}  // namespace

TEST_CASE("a rank alone exchanges with itself", "[communicator][cuda]") {
    ON_EACH_DEVICE();
    const World world;
    Activity activity;
    Stream stream(test_device());
    const auto ranks = open_communicator(world, test_device(), activity);
    const TemporaryDirectory folder;
    const Group g{*ranks, stream, activity, {{0}}, !test_device().is_cuda()};
    check_group(g, folder / "barrier");
    check_split(g);
    CHECK(ranks->bytes_sent() == 0);
}

namespace {

/// A group of two whose gathers take a given time at least.
class SlowGroup : public Communicator {
  public:
    SlowGroup() : Communicator(0, 2) {}
    void all_reduce(Stream&, void*, int64_t, DType, Reduction) override {}
    void reduce_scatter(Stream&, void*, void*, int64_t, DType) override {}
    void all_gather(Stream&, void*, const void*, int64_t count, DType dtype) override {
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        bytes = count * static_cast<int64_t>(size_of(dtype));
        bytes_sent_ += bytes;
    }
    void broadcast(Stream&, void*, int64_t, DType, int) override {}
    void send(Stream&, const void*, int64_t, DType, int) override {}
    void receive(Stream&, void*, int64_t, DType, int) override {}
    void barrier(Stream&) override {}
    std::unique_ptr<Communicator> split(int, int, int) override { return nullptr; }

    static constexpr double seconds = 0.02;
    int64_t bytes = 0;  // of the last gather
};

}  // namespace

TEST_CASE("the link's speed is that of the bytes that are sent at a time", "[communicator]") {
    SlowGroup group;
    const double speed = measure_link(group, Device{}, random_int(2000, 1 << 20), DType::bf16);
    CAPTURE(speed, group.bytes);
    CHECK(speed > 0);
    CHECK(speed <= static_cast<double>(group.bytes) / SlowGroup::seconds);
    const World world;
    Activity activity;
    const auto alone = open_communicator(world, Device{}, activity);
    CHECK(measure_link(*alone, Device{}, 1000, DType::fp32) == 0);
}

TEST_CASE("ranks: cpu collectives", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    Activity activity;
    Stream stream;
    const auto ranks = open_communicator(world, Device{}, activity);
    REQUIRE(ranks->rank() == world.rank());
    REQUIRE(ranks->size() == std::atoi(std::getenv("RANKS")));
    const Group g{*ranks, stream, activity,
                  nodes_of(std::vector<int>(static_cast<size_t>(world.size()), 0))};
    check_group(g, barrier_file(world, "barrier"));
    if (world.size() > 1) check_split(g);
}

TEST_CASE("ranks of one node reduce, gather, broadcast, send and split", "[communicator]") {
    const TemporaryDirectory folder;
    for (const Launcher launcher : kinds_of_links())
        for (const int n : {1, 2, 3, 4, 8}) {
            const ProgramResult result = run_case_on_ranks(
                n, "ranks: cpu collectives",
                {{"RANKS", std::to_string(n)}, {"FOLDER", folder / name_of(launcher)}}, launcher);
            INFO(name_of(launcher) << ", " << n << " ranks, " << result.seconds << " s\n"
                                   << result.output);
            CHECK(result.exit_code == 0);
        }
}

TEST_CASE("ranks: several nodes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const auto n = static_cast<size_t>(world.size());
    std::vector<std::vector<int>> layouts(3, std::vector<int>(n));
    for (size_t r = 0; r < n; ++r) {
        layouts[0][r] = r + 1 < n ? 0 : 1;        // the last rank alone
        layouts[1][r] = static_cast<int>(r % 2);  // mpirun --map-by node
        layouts[2][r] =
            5 + static_cast<int>(random_int(0, static_cast<int>(n)));  // random, same on all ranks
    }
    for (size_t l = 0; l < layouts.size(); ++l) {
        const std::vector<int>& nodes = layouts[l];
        Activity activity;
        Stream stream;
        const auto ranks =
            open_cpu_communicator(world, activity, nodes[static_cast<size_t>(world.rank())],
                                  {.encrypt = std::getenv("ENCRYPT") != nullptr});
        const Group g{*ranks, stream, activity, nodes_of(nodes)};
        check_group(g, barrier_file(world, "nodes" + std::to_string(l) + "-"));
        check_split(g);

        // Whatever the layout, each block goes to every other rank, either through memory or
        // between nodes.
        const Buffer<float> all(world.size() * 100);
        const int64_t before = ranks->bytes_sent();
        ranks->all_gather(stream, all.data(), all.data() + world.rank() * 100, 100, DType::fp32);
        double sent[] = {static_cast<double>(ranks->bytes_sent() - before)};
        world.all_reduce_sum(sent);
        CHECK(sent[0] == 400.0 * world.size() * (world.size() - 1));
        ranks->reduce_scatter(stream, all.data() + world.rank() * 100, all.data(), 100,
                              DType::fp32);
        CHECK(ranks->bytes_sent() - before - 400 * (world.size() - 1) <=
              400 * (world.size() - 1) * world.size());
    }
}

TEST_CASE("ranks of nodes of different sizes and in any order exchange the same",
          "[communicator]") {
    const TemporaryDirectory folder;
    for (const Launcher launcher : kinds_of_links())
        for (const int n : {2, 3, 5}) {
            const ProgramResult result = run_case_on_ranks(
                n, "ranks: several nodes", {{"FOLDER", folder / name_of(launcher)}}, launcher);
            INFO(name_of(launcher) << ", " << n << " ranks, " << result.seconds << " s\n"
                                   << result.output);
            CHECK(result.exit_code == 0);
        }
    const ProgramResult encrypted =
        run_case_on_ranks(4, "ranks: several nodes",
                          {{"FOLDER", folder / "encrypted"}, {"ENCRYPT", "1"}}, Launcher::own);
    INFO(encrypted.output);
    CHECK(encrypted.exit_code == 0);
}

TEST_CASE("ranks: encrypt", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    Activity activity;
    const bool wanted = std::string(std::getenv("ENCRYPT")) == "all" || world.rank() == 1;
    std::printf("refused: %s\n", error_of([&] {
                                     open_communicator(world, Device{}, activity,
                                                       {.encrypt = wanted});
                                 }).c_str());
    std::fflush(stdout);
    world.abort(5);
}

TEST_CASE("ranks whose messages cannot be encrypted refuse to be told so", "[communicator]") {
    const ProgramResult some =
        run_case_on_ranks(2, "ranks: encrypt", {{"ENCRYPT", "one"}}, Launcher::own);
    INFO(some.output);
    CHECK(contains(some.output, "refused: parallel.encrypt is not the same on all ranks"));
    if (skip_without_mpirun()) return;
    const ProgramResult mpi =
        run_case_on_ranks(2, "ranks: encrypt", {{"ENCRYPT", "all"}}, Launcher::mpirun);
    INFO(mpi.output);
    CHECK(contains(mpi.output,
                   "refused: parallel.encrypt is true, but these ranks were started "
                   "through MPI"));
}

namespace {

/// Rank 0 enters a collective that rank 1 never enters, and another thread aborts the group.
void give_up(const World& world, Communicator& ranks, const Device& device, Activity& activity) {
    Stream stream(device);
    const Buffer<float> data(1000);
    ranks.barrier(stream);
    stream.synchronize();
    if (world.rank() != 0) {
        for (;;) ::pause();
    }
    const int64_t entered = activity.collectives;
    std::thread watchdog([&] {
        while (activity.collectives == entered) std::this_thread::yield();
        ranks.abort();
    });
    const std::string message = error_of([&] {
        ranks.all_reduce(stream, data.data(), 1000, DType::fp32);
        stream.synchronize();
        watchdog.join();  // on a GPU, the stream may continue before the group is closed
        ranks.check();
    });
    if (watchdog.joinable()) watchdog.join();
    std::printf("rank 0 gave up: %s\n", message.c_str());
    std::fflush(stdout);
}

void check_gave_up(const ProgramResult& result) {
    INFO(result.output);
    CHECK(result.exit_code > 0);
    CHECK(contains(result.output, "rank 0 gave up: "));
    CHECK(contains(result.output, "all-reduce"));
}

void die(Communicator& ranks, const Device& device) {
    Stream stream(device);
    const Buffer<float> data(100000);
    for (int step = 0; step < 100; ++step) {
        if (step == 50 && ranks.rank() == 1) ::raise(SIGKILL);
        ranks.all_reduce(stream, data.data(), 100000, DType::fp32);
        stream.synchronize();
        ranks.check();
    }
    std::printf("a rank went on\n");
}

void check_died(const ProgramResult& result) {
    INFO(result.output);
    CHECK(result.exit_code > 0);
    CHECK(!contains(result.output, "a rank went on"));
}

}  // namespace

TEST_CASE("ranks: cpu give up", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    Activity activity;
    const bool is_shared = std::atoi(std::getenv("NODES")) == 1;
    const auto ranks = open_cpu_communicator(world, activity, is_shared ? 0 : world.rank());
    give_up(world, *ranks, Device{}, activity);
}

TEST_CASE("ranks: cpu die", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    Activity activity;
    die(*open_communicator(world, Device{}, activity), Device{});
}

TEST_CASE("a rank that waits for one that is gone ends, or leaves with an Error when told to",
          "[communicator]") {
    for (const Launcher launcher : kinds_of_links()) {
        for (const char* nodes : {"1", "2"})
            check_gave_up(run_case_on_ranks(2, "ranks: cpu give up", {{"NODES", nodes}}, launcher));
        check_died(run_case_on_ranks(3, "ranks: cpu die", {}, launcher));
    }
}

#ifdef TRAIN_GPT_CUDA

namespace {

/// The GPU of this rank; also makes it the device under test.
struct Gpu {
    explicit Gpu(const World& world) : device(device_of_rank(world, "cuda")), under_test(device) {}
    Device device;
    DeviceUnderTest under_test;
};

/// The sum of the numbers that follow each occurrence of a word.
int64_t sum_behind(const std::string& text, const std::string& word) {
    int64_t sum = 0;
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
        sum += std::strtoll(text.c_str() + at + word.size(), nullptr, 10);
    return sum;
}

}  // namespace

TEST_CASE("ranks: gpu collectives", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Gpu gpu(world);
    Activity activity;
    {
        Stream stream(gpu.device);
        const auto ranks = open_communicator(world, gpu.device, activity);
        REQUIRE(ranks->size() == std::atoi(std::getenv("RANKS")));
        const Group g{*ranks, stream, activity, {}, false};
        check_group(g, barrier_file(world, "barrier"));
        const int64_t sent_in_parts = check_split(g);
        double sent[] = {static_cast<double>(ranks->bytes_sent() + sent_in_parts)};
        world.all_reduce_sum(sent);
        if (world.rank() == 0) std::printf("all sent=%.0f\n", sent[0]);
    }
    std::fflush(stdout);
}

TEST_CASE(
    "ranks on GPUs reduce, gather, broadcast, send and split, whatever order their streams run in",
    "[communicator][cuda]") {
    if (skip_without_gpus(4)) return;
    const bool simulated = device_name({Device::Kind::cuda, 0}).find("gpusim") != std::string::npos;
    for (const int n : {2, 4}) {
        for (const char* streams : {"", "lazy"}) {
            const TemporaryDirectory folder;
            const ProgramResult result =
                run_case_on_ranks(n, "ranks: gpu collectives",
                                  {{"RANKS", std::to_string(n)},
                                   {"FOLDER", folder / "gpu"},
                                   {"GPUSIM_STREAMS", streams},
                                   {"GPUSIM_SEED", "3"},
                                   {"GPUSIM_STATS", "1"},
                                   {"GPUSIM_STATS_FILE", folder / "volume"}},
                                  n == 2 ? Launcher::own : usual_launcher());
            INFO(n << " ranks, " << result.seconds << " s\n" << result.output);
            CHECK(result.exit_code == 0);
            if (!simulated) continue;
            const int64_t counted = sum_behind(read(folder / "volume"), " total sent=");
            CHECK(counted > 0);
            CHECK(counted == sum_behind(result.output, "all sent="));
        }
    }
}

TEST_CASE("ranks: gpu open", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Gpu gpu(world);
    Activity activity;
    const std::string message = error_of([&] { open_communicator(world, gpu.device, activity); });
    std::printf("rank %d: %s\n", world.rank(), message.c_str());
    std::fflush(stdout);
}

namespace {

/// The library that this process opens.
fs::path nccl_file() {
    Dl_info info{};
    void* const library = ::dlopen("libnccl.so.2", RTLD_NOW);
    REQUIRE(library);
    REQUIRE(::dladdr(::dlsym(library, "ncclGetVersion"), &info) != 0);
    return fs::canonical(info.dli_fname);
}

}  // namespace

TEST_CASE("ranks on GPUs say on all of them that NCCL cannot be loaded", "[communicator][cuda]") {
    if (skip_without_gpus(2)) return;
    // The runtime's own folder is searched, too.
    const TemporaryDirectory folder;
    const fs::path runtime = cuda::places_of({"libcudart.so.13", "cuda_runtime"}).at(1);
    for (const auto& entry : fs::directory_iterator(runtime.parent_path()))
        if (!entry.path().filename().string().starts_with("libnccl"))
            fs::create_symlink(fs::absolute(entry.path()),
                               folder / entry.path().filename().string());
    write(folder / "libnccl.so.2", "no library");
    const char* libraries = std::getenv("LD_LIBRARY_PATH");
    const Environment without{
        {"LD_LIBRARY_PATH", folder.path() + ":" + (libraries ? libraries : "")},
        {"VIRTUAL_ENV", ""},
        {"CONDA_PREFIX", ""}};
    const ProgramResult result = run_case_on_ranks(2, "ranks: gpu open", without);
    INFO(result.output);
    CHECK(result.exit_code == 0);
    for (const char* rank : {"rank 0: ", "rank 1: "})
        CHECK(
            contains(result.output,
                     rank + World().host() +
                         ": training on several GPUs needs NCCL, whose library cannot be loaded"));

    // Where NVIDIA's package for Python has it, it is found.
    const std::string package = folder / "venv/lib/python3.12/site-packages/nvidia/nccl/lib";
    fs::create_directories(package);
    fs::create_symlink(nccl_file(), package + "/libnccl.so.2");
    Environment active = without;
    active["VIRTUAL_ENV"] = folder / "venv";
    const ProgramResult found = run_case_on_ranks(2, "ranks: gpu open", active);
    INFO(found.output);
    CHECK(found.exit_code == 0);
    for (const char* rank : {"rank 0: \n", "rank 1: \n"}) CHECK(contains(found.output, rank));
}

TEST_CASE("ranks: gpu give up", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Gpu gpu(world);
    Activity activity;
    give_up(world, *open_communicator(world, gpu.device, activity), gpu.device, activity);
    world.abort(1);  // only this rank has noticed, and it does not wait
}

TEST_CASE("ranks: gpu die", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Gpu gpu(world);
    Activity activity;
    die(*open_communicator(world, gpu.device, activity), gpu.device);
}

TEST_CASE(
    "a rank on a GPU that waits for one that is gone ends, or leaves with an Error when told to",
    "[communicator][cuda]") {
    if (skip_without_gpus(3)) return;
    check_gave_up(run_case_on_ranks(2, "ranks: gpu give up"));
    check_died(run_case_on_ranks(3, "ranks: gpu die"));
}

#endif
