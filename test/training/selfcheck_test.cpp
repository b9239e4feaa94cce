#include "training/selfcheck.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/plan/efficiencies.h"

using namespace train_gpt;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

/// Ranks with these rates, on hosts a, b, c, …
SelfcheckTable table_of(const std::vector<RankRates>& rates) {
    SelfcheckTable table;
    for (size_t rank = 0; rank < rates[0].of_rank.size(); ++rank) {
        table.hosts.push_back("host-" + std::string(1, static_cast<char>('a' + rank)));
        table.devices.push_back("device " + std::to_string(rank));
    }
    table.rates = rates;
    return table;
}

std::vector<int> ranks_of(const std::vector<SlowRank>& slow) {
    std::vector<int> ranks;
    for (const SlowRank& s : slow) ranks.push_back(s.rank);
    return ranks;
}

double uniform_between(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(test_rng());
}

std::string line_with(const std::string& text, const std::string& part) {
    const size_t at = text.find(part);
    if (at == std::string::npos) return "";
    const size_t begin = text.rfind('\n', at) + 1;
    return text.substr(begin, text.find('\n', at) - begin);
}

}  // namespace

TEST_CASE("a rank that is slower than the tolerance allows is named once, a faster one never",
          "[selfcheck]") {
    for (const int64_t ranks : {3, 4, 7, 8}) {
        const double usual = std::exp(uniform_between(-5, 10)), tolerance = uniform_between(5, 30);
        std::vector<double> flops, bandwidth, copies;
        for (int64_t i = 0; i < ranks; ++i) {
            flops.push_back(usual * uniform_between(0.999, 1.001));
            bandwidth.push_back(uniform_between(99.9, 100.1));
            copies.push_back(uniform_between(9.99, 10.01));
        }
        const auto rates = [&] {
            return std::vector<RankRates>{
                {"TFLOP/s", flops}, {"GB/s", bandwidth}, {"copies GB/s", copies}};
        };
        CAPTURE(ranks, usual, tolerance);
        CHECK(find_slow_ranks(rates(), tolerance).empty());

        const auto slow = static_cast<size_t>(random_int(0, ranks - 1));
        const size_t fast = (slow + 1) % static_cast<size_t>(ranks);
        flops[slow] = usual * (1 - (tolerance + 1) / 100);
        bandwidth[slow] = 100 * (1 - (tolerance + 1) / 100);
        flops[fast] = usual * (1 + (tolerance + 1) / 100);
        copies[fast] = 1000;
        const std::vector<SlowRank> found = find_slow_ranks(rates(), tolerance);
        REQUIRE(ranks_of(found) == std::vector<int>{static_cast<int>(slow)});
        REQUIRE(found[0].rates.size() == 2);
        CHECK(found[0].rates[0].name == "TFLOP/s");
        CHECK(found[0].rates[1].name == "GB/s");
        CHECK(found[0].rates[1].value == bandwidth[slow]);
        CHECK(std::abs(found[0].rates[1].median / 100 - 1) < 0.002);
        // With a larger tolerance, it is no longer slow.
        CHECK(find_slow_ranks(rates(), tolerance + 2).empty());

        SelfcheckTable table = table_of(rates());
        table.rates_again = rates();
        const std::string text = format_selfcheck(table, found, tolerance);
        const std::string named = line_with(text, "% below");
        CAPTURE(text);
        CHECK(named.starts_with("rank " + std::to_string(slow) + " (" + table.hosts[slow] + ", " +
                                table.devices[slow] + "): TFLOP/s "));
        CHECK(contains(named, "; GB/s "));
        CHECK(occurrences(text, "% below") == 2);
        CHECK(occurrences(text, "\n" + named.substr(0, named.find(':'))) == 1);
        CHECK(occurrences(text, "measured again") == 1);
        CHECK(!contains(text, "no rank"));
    }
}

TEST_CASE("of two ranks only the slower one is named", "[selfcheck]") {
    const double low = uniform_between(1, 2), high = low * 1.2;  // 9.1 % below and above their mean
    const auto slow_at = [](const std::vector<double>& rates, double tolerance) {
        return ranks_of(find_slow_ranks({{"r", rates}}, tolerance));
    };
    CHECK(slow_at({low, high}, 9.2).empty());
    CHECK(slow_at({low, high}, 9) == std::vector<int>{0});
    CHECK(slow_at({high, low}, 9) == std::vector<int>{1});
    CHECK(slow_at({low, low}, 0).empty());
    // Of four, the median is the mean of the middle two; of three, it is the middle one.
    const auto four = find_slow_ranks({{"r", {10 * high, low, high, low / 10}}}, 15);
    REQUIRE(ranks_of(four) == std::vector<int>{3});
    CHECK(std::abs(four[0].rates[0].median - (low + high) / 2) < 1e-12);
    CHECK(slow_at({high, low, low}, 0).empty());
    CHECK(slow_at({high, low, high}, 15) == std::vector<int>{1});
}

TEST_CASE("only what is slow in both measurements counts", "[selfcheck]") {
    // A load slows one rank, then the other; or it slows the same rank, but another rate.
    const auto rates = [](const std::vector<double>& flops, const std::vector<double>& bandwidth) {
        return std::vector<RankRates>{{"TFLOP/s", flops}, {"GB/s", bandwidth}};
    };
    const double tolerance = uniform_between(5, 20), full = std::exp(uniform_between(-5, 5));
    const double slower = full * uniform_between(0.1, 0.5),
                 slowest = slower * uniform_between(0.1, 0.9);
    const auto confirmed = [&](const std::vector<RankRates>& first,
                               const std::vector<RankRates>& second) {
        return slow_in_both(find_slow_ranks(first, tolerance), find_slow_ranks(second, tolerance));
    };
    const std::vector<double> alike{full, full}, first_slow{slower, full},
        second_slow{full, slower};
    CHECK(confirmed(rates(first_slow, alike), rates(second_slow, alike)).empty());
    CHECK(confirmed(rates(first_slow, alike), rates(alike, first_slow)).empty());
    CHECK(confirmed(rates(first_slow, second_slow), rates(alike, alike)).empty());
    CHECK(confirmed(rates(alike, alike), rates(first_slow, second_slow)).empty());

    const auto twice =
        confirmed(rates(second_slow, second_slow), rates({full, slowest}, first_slow));
    REQUIRE(ranks_of(twice) == std::vector<int>{1});
    REQUIRE(twice[0].rates.size() == 1);
    CHECK(twice[0].rates[0].name == "TFLOP/s");
    CHECK(twice[0].rates[0].value == slowest);
    CHECK(twice[0].rates[0].median == (full + slowest) / 2);
    const std::vector<RankRates> each = rates(first_slow, second_slow);
    CHECK(ranks_of(confirmed(each, each)) == std::vector<int>{0, 1});

    SelfcheckTable table = table_of(rates(first_slow, alike));
    table.rates_again = rates(second_slow, alike);
    CHECK(contains(format_selfcheck(table, {}, tolerance), "at the same rate both times"));
}

TEST_CASE("a rate that is not a positive number is slow and does not move the median",
          "[selfcheck]") {
    for (const double bad : {0.0, -1.0, not_a_number, std::numeric_limits<double>::infinity()}) {
        CAPTURE(bad);
        const SelfcheckTable table = table_of({{"r", {7, 7, bad, 7, bad}}});
        const std::vector<SlowRank> slow = find_slow_ranks(table.rates, 100);
        CHECK(ranks_of(slow) == std::vector<int>{2, 4});
        for (const SlowRank& s : slow) CHECK(s.rates[0].median == 7);
        CHECK(ranks_of(slow_in_both(slow, slow)) == std::vector<int>{2, 4});
        CHECK(contains(format_selfcheck(table, slow, 100),
                       "rank 2 (host-c, device 2): r could not be measured"));
        CHECK(ranks_of(find_slow_ranks({{"r", {bad, bad}}}, 100)) == std::vector<int>{0, 1});
    }
}

TEST_CASE("one rank is compared with nothing", "[selfcheck]") {
    const SelfcheckTable table = table_of({{"r", {uniform_between(1e-3, 1e3)}}});
    CHECK(find_slow_ranks(table.rates, 0).empty());
    const std::string text = format_selfcheck(table, {}, 15);
    CHECK(contains(text, "nothing to compare"));
    CHECK(!contains(text, "median"));
    CHECK(!contains(text, "collectives"));
}

TEST_CASE("the table has a row for each rank and each size, in columns", "[selfcheck]") {
    SelfcheckTable table = table_of({{"TFLOP/s", {812.25, 810.5}}, {"GB/s", {4000, 4.125}}});
    table.devices[1] = "GPU with “quotes”";  // its width is counted in characters
    table.collectives = {{65536, 1.5e9, 2.25e9, 3e9},
                         {int64_t{256} << 20, 1.5e11, 2.5e11, 3.125e11}};
    const std::string text = format_selfcheck(table, {}, 15);
    CAPTURE(text);
    const std::string first = line_with(text, "host-a"), second = line_with(text, "host-b"),
                      median = line_with(text, "median ");
    for (const char* cell : {"812.250", "4000.000"}) CHECK(contains(first, cell));
    for (const char* cell : {"810.500", "4.125"}) CHECK(contains(second, cell));
    for (const char* cell : {"811.375", "2002.062"}) CHECK(contains(median, cell));
    CHECK(first.size() + 4 == second.size());
    CHECK(first.size() == median.size());
    CHECK(line_with(text, "TFLOP/s").size() == first.size());
    for (const char* cell : {"1.500", "2.250", "3.000"})
        CHECK(contains(line_with(text, "64 KiB"), cell));
    for (const char* cell : {"150.000", "250.000", "312.500"})
        CHECK(contains(line_with(text, "256 MiB"), cell));
    CHECK(contains(text, "2 ranks"));
    CHECK(contains(text, "no rank is more than 15% below the median"));
}

TEST_CASE("bus bandwidth is what a ring sends over each link, whatever the number of ranks",
          "[selfcheck]") {
    for (const int ranks : {2, 3, 8, 1024}) {
        const int64_t bytes = random_int(1, 1 << 30);
        const double link = std::exp(uniform_between(10, 27));  // bytes per second
        // In a ring, each rank sends all blocks but one, and for an all-reduce twice as many.
        const double seconds = static_cast<double>(bytes) / ranks * (ranks - 1) / link;
        CAPTURE(ranks, bytes, link);
        CHECK(std::abs(half_reduce_bandwidth(ranks, bytes, seconds) / link - 1) < 1e-12);
        CHECK(std::abs(all_reduce_bandwidth(ranks, bytes, 2 * seconds) / link - 1) < 1e-12);
    }
    CHECK(half_reduce_bandwidth(4, 4'000'000, 1.0) == 3e6);
    CHECK(all_reduce_bandwidth(4, 4'000'000, 1.0) == 6e6);
}

TEST_CASE("collectives are measured from 64 KiB on, in steps of four, up to the limit",
          "[selfcheck]") {
    CHECK(collective_sizes(int64_t{256} << 20) == std::vector<int64_t>{64 << 10, 256 << 10, 1 << 20,
                                                                       4 << 20, 16 << 20, 64 << 20,
                                                                       256 << 20});
    CHECK(collective_sizes((int64_t{256} << 20) - 1).size() == 6);
    CHECK(collective_sizes(64 << 10) == std::vector<int64_t>{64 << 10});
    CHECK(collective_sizes(1) == std::vector<int64_t>{64 << 10});
}

TEST_CASE("what selfcheck measured is a cluster that a plan reads", "[selfcheck][cluster]") {
    SelfcheckTable table;
    table.hosts = {"a", "a", "b", "b"};
    table.devices = {4, "a processor"};
    table.rates = {{"bf16 TFLOP/s", {1, 2, 3, 4}},
                   {"fp32 TFLOP/s", {0.5, 0.5, 0.5, 0.5}},
                   {"memory GB/s", {40, 40, 20, 40}}};
    table.collectives = {
        {.bytes = 1 << 20, .reduce_scatter = 1e9, .all_gather = 3e9, .all_reduce = 2e9},
        {.bytes = 1 << 24, .reduce_scatter = 5e9, .all_gather = 5e9, .all_reduce = 6e9}};
    table.shares = {.products = uniform_between(0.5, 1.1),
                    .half_size = uniform_between(0, 500),
                    .attention = uniform_between(0.1, 0.9),
                    .attention_backward = uniform_between(1.5, 4)};
    const TemporaryDirectory folder;
    for (const int of_node : {4, 2}) {
        const Cluster measured = measured_cluster(table, Device{}, of_node);
        write(folder / "mine.json", to_text(measured));
        const Cluster cluster = find_cluster(folder / "mine.json");
        CHECK(cluster.is_measured);
        CHECK(cluster.flops_bf16 == Approx(2.5e12));  // the median
        CHECK(cluster.memory_bandwidth == Approx(40e9));
        CHECK(cluster.ranks_per_node == of_node);
        const Link &link = of_node == 4 ? cluster.node : cluster.network,
                   &other = of_node == 4 ? cluster.network : cluster.node;
        CHECK(link.measured.size() == 2);
        CHECK(link.bandwidth_of(1 << 20, 2) == Approx(2e9));
        CHECK(link.bandwidth_of(1 << 24, 2) == Approx(5e9));
        CHECK(other.measured.empty());
        const Efficiencies e = efficiencies_of(Software::own, cluster, false);
        CHECK(e.products == Approx(table.shares.products));
        CHECK(e.half_size == Approx(table.shares.half_size));
        CHECK(e.attention == Approx(table.shares.attention));
        CHECK(e.attention_backward == Approx(table.shares.attention_backward));
        CHECK(contains(cluster.note, of_node == 4 ? "between nodes" : "inside nodes"));
    }
}
