#include "training/selfcheck.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

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

std::vector<int> ranks_of(const std::vector<Outlier>& outliers) {
    std::vector<int> ranks;
    for (const Outlier& o : outliers) ranks.push_back(o.rank);
    return ranks;
}

double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(test_rng());
}

std::string line_with(const std::string& text, const std::string& part) {
    const size_t at = text.find(part);
    if (at == std::string::npos) return "";
    const size_t begin = text.rfind('\n', at) + 1;
    return text.substr(begin, text.find('\n', at) - begin);
}

}  // namespace

TEST_CASE(
    "a rank that is slower or faster than the tolerance allows is named with rate, host and "
    "distance",
    "[selfcheck]") {
    for (const int64_t ranks : {3, 4, 7, 8}) {
        const double usual = std::exp(uniform(-5, 10)), tolerance = uniform(5, 30);
        std::vector<double> flops, bandwidth;
        for (int64_t i = 0; i < ranks; ++i) {
            flops.push_back(usual * uniform(0.999, 1.001));
            bandwidth.push_back(uniform(99.9, 100.1));
        }
        CAPTURE(ranks, usual, tolerance);
        CHECK(
            find_outliers(table_of({{"TFLOP/s", flops}, {"GB/s", bandwidth}}), tolerance).empty());

        const auto slow = static_cast<size_t>(random_int(0, ranks - 1));
        const size_t fast = (slow + 1) % static_cast<size_t>(ranks);
        bandwidth[slow] = 100 * (1 - (tolerance + 1) / 100);
        flops[fast] = usual * (1 + (tolerance + 1) / 100);
        const SelfcheckTable table = table_of({{"TFLOP/s", flops}, {"GB/s", bandwidth}});
        std::vector<Outlier> outliers = find_outliers(table, tolerance);
        REQUIRE(outliers.size() == 2);
        CHECK(std::is_sorted(outliers.begin(), outliers.end(),
                             [](auto& a, auto& b) { return a.rank < b.rank; }));
        if (outliers[0].rate != "GB/s") std::swap(outliers[0], outliers[1]);
        CHECK(outliers[0].rank == static_cast<int>(slow));
        CHECK(outliers[0].value == bandwidth[slow]);
        CHECK(std::abs(outliers[0].median / 100 - 1) < 0.002);
        CHECK(outliers[1].rank == static_cast<int>(fast));
        CHECK(outliers[1].rate == "TFLOP/s");
        // Further allowed, it is no outlier any more.
        CHECK(find_outliers(table, tolerance + 2).empty());

        const std::string text = format_selfcheck(table, outliers, tolerance);
        const std::string below = line_with(text, "% below");
        CAPTURE(text);
        for (const std::string& part : {"rank " + std::to_string(slow), table.hosts[slow],
                                        table.devices[slow], std::string("GB/s ")})
            CHECK(contains(below, part));
        CHECK(contains(line_with(text, "% above"), table.hosts[fast]));
        CHECK(!contains(text, "all ranks are within"));
    }
}

TEST_CASE("the median of an even number of ranks lies between the two in the middle",
          "[selfcheck]") {
    const double low = uniform(1, 2), high = low * 1.2;  // 9.1 % below and above their mean
    CHECK(find_outliers(table_of({{"r", {low, high}}}), 9.2).empty());
    CHECK(ranks_of(find_outliers(table_of({{"r", {low, high}}}), 9)) == std::vector<int>{0, 1});
    const auto four = find_outliers(table_of({{"r", {10 * high, low, high, low / 10}}}), 15);
    CHECK(ranks_of(four) == std::vector<int>{0, 3});
    for (const Outlier& o : four) CHECK(std::abs(o.median - (low + high) / 2) < 1e-12);
    // Of three it is the one in the middle.
    CHECK(ranks_of(find_outliers(table_of({{"r", {high, low, low}}}), 15)) == std::vector<int>{0});
}

TEST_CASE("a rate that is no positive number is an outlier and moves no median", "[selfcheck]") {
    for (const double bad : {0.0, -1.0, not_a_number, std::numeric_limits<double>::infinity()}) {
        CAPTURE(bad);
        const SelfcheckTable table = table_of({{"r", {7, 7, bad, 7, bad}}});
        const std::vector<Outlier> outliers = find_outliers(table, 1000);
        CHECK(ranks_of(outliers) == std::vector<int>{2, 4});
        for (const Outlier& o : outliers) CHECK(o.median == 7);
        CHECK(contains(format_selfcheck(table, outliers, 1000),
                       "rank 2 (host-c, device 2): r could not be measured"));
        CHECK(ranks_of(find_outliers(table_of({{"r", {bad, bad}}}), 1000)) ==
              std::vector<int>{0, 1});
    }
}

TEST_CASE("one rank is compared with nothing", "[selfcheck]") {
    const SelfcheckTable table = table_of({{"r", {uniform(1e-3, 1e3)}}});
    CHECK(find_outliers(table, 0).empty());
    const std::string text = format_selfcheck(table, {}, 15);
    CHECK(contains(text, "nothing to compare"));
    CHECK(!contains(text, "median"));
    CHECK(!contains(text, "collectives"));
}

TEST_CASE("the table has a row for each rank and each size, in columns", "[selfcheck]") {
    SelfcheckTable table = table_of({{"TFLOP/s", {812.25, 810.5}}, {"GB/s", {4000, 4.125}}});
    table.devices[1] = "GPU with “quotes”";  // as wide as it looks
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
    CHECK(contains(text, "all ranks are within 15% of the median"));
}

TEST_CASE("bus bandwidth is what a ring sends over each link, whatever the number of ranks",
          "[selfcheck]") {
    for (const int ranks : {2, 3, 8, 1024}) {
        const int64_t bytes = random_int(1, 1 << 30);
        const double link = std::exp(uniform(10, 27));  // bytes per second
        // In a ring each rank sends all blocks but one; for an all-reduce twice.
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
