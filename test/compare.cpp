// Compares the kernels' implementations by hand: how far their results are from float64 and from
// each other, how long they take, and how near that is to the best the device can reach.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/error.h"
#include "device/process.h"
#include "test/compare/measure.h"
#include "test/compare/operations.h"
#include "test/kernels/test_device.h"

namespace train_gpt::compare {
namespace {

struct Options {
    std::vector<std::string> kernels;
    std::string shape, dtype = "both", device = "all";
    bool list = false, all = false, no_reference = false;
    int repeat = 10;
    uint64_t seed = 0;
};

// --- Tables --------------------------------------------------------------------------------------

/// Width in characters; UTF-8 encodes a character in one to four bytes.
size_t width_of(const std::string& text) {
    return static_cast<size_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

/// A Markdown table whose rows appear as soon as they are known.
class Table {
  public:
    struct Column {
        std::string name;
        size_t width = 0;
        bool right = false;
    };

    explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {
        std::vector<std::string> names;
        std::string line = "|";
        for (Column& column : columns_) {
            column.width = std::max(column.width, width_of(column.name));
            names.push_back(column.name);
            line += std::string(column.width + (column.right ? 1 : 2), '-') +
                    (column.right ? ":|" : "|");
        }
        row(names);
        std::printf("%s\n", line.c_str());
    }
    void row(const std::vector<std::string>& cells) const {
        std::string line = "|";
        for (size_t i = 0; i < columns_.size(); ++i) {
            const std::string padding(
                columns_[i].width - std::min(columns_[i].width, width_of(cells[i])), ' ');
            line += " " + (columns_[i].right ? padding + cells[i] : cells[i] + padding) + " |";
        }
        std::printf("%s\n", line.c_str());
        std::fflush(stdout);
    }

  private:
    std::vector<Column> columns_;
};

std::string number(const char* format, double value) {
    if (std::isnan(value)) return "NaN";
    char text[64];
    std::snprintf(text, sizeof text, format, value);
    return text;
}

std::string text_of(const Shape& shape, const std::vector<Letter>& order) {
    std::string text;
    for (const Letter& letter : order)
        text += concat(text.empty() ? "" : " ", letter.name, "=", shape.at(letter.name));
    return text;
}

// --- What is compared ----------------------------------------------------------------------------

Shape small_shape(const Operation& operation) {
    Shape shape;
    for (const Letter& letter : operation.letters) shape[letter.name] = letter.small;
    return shape;
}

Shape gpt2_shape(const Operation& operation, const Device& device) {
    Shape shape;
    for (const Letter& letter : operation.letters)
        shape[letter.name] = device.is_cuda() ? letter.gpu : letter.cpu;
    return shape;
}

/// A result compared with what it should be.
/// The results of one implementation.
struct Judged {
    Device device;
    Implementation implementation;
    std::vector<Judgement> judgements;
};

// --- The program ---------------------------------------------------------------------------------

class Comparison {
  public:
    explicit Comparison(const Options& options) : options_(options) {
        for (const Operation& operation : operations()) {
            const auto& wanted = options.kernels;
            if (wanted.empty() ||
                std::find(wanted.begin(), wanted.end(), operation.name) != wanted.end())
                chosen_.push_back(&operation);
        }
        for (const std::string& name : options.kernels) require_kernel(name);
        read_shape();
        if (options.dtype != "bf16") dtypes_.push_back(DType::fp32);
        if (options.dtype != "fp32") dtypes_.push_back(DType::bf16);
    }

    void list() const {
        const Table table({{"kernel", 28}, {"computes", 84}, {"shape by default"}});
        for (const Operation* operation : chosen_)
            table.row({operation->name, operation->computes,
                       text_of(small_shape(*operation), operation->letters)});
    }

    /// The exit code.
    int run() {
        open_devices();
        print_introduction();
        if (options_.all) {
            compare_at_gpt2_shapes();
        } else {
            for (const Operation* operation : chosen_) compare(*operation);
        }
        if (failures_ == 0) return 0;
        std::fprintf(stderr, "compare: %d failures: results marked ✗ and errors named above\n",
                     failures_);
        return 1;
    }

  private:
    void require_kernel(const std::string& name) const;
    void read_shape();
    void open_devices();
    void print_introduction() const;
    void compare(const Operation& operation);
    void compare_at_gpt2_shapes();
    std::vector<std::string> speed_cells(const Judged& judged, const Operation& operation,
                                         const Operands& operands) const;
    std::vector<std::string> error_cells(const Judgement& judgement);
    /// Calls visit for each implementation.
    void judge_all(const Operation& operation, const Operands& operands,
                   const std::function<void(const Judged&)>& visit);
    std::vector<DType> dtypes_of(const Operation& operation) const;
    /// Runs the action. An Error is printed and counted, and the caller continues with the next.
    void attempt(const Operation& operation, DType dtype, const std::function<void()>& action);

    const Options& options_;
    std::vector<const Operation*> chosen_;
    Shape given_;  // by --shape
    std::vector<DType> dtypes_;
    std::vector<Device> devices_;
    std::vector<Limits> limits_;  // of each device; a bandwidth of 0 means that it is not timed
    int failures_ = 0;
};

/// Insertions, deletions and replacements that turn a into b.
size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = std::exchange(row[0], i);
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t above = row[j];
            row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
            diagonal = above;
        }
    }
    return row[b.size()];
}

void Comparison::require_kernel(const std::string& name) const {
    const auto& all = operations();
    if (std::any_of(all.begin(), all.end(), [&](const Operation& o) { return o.name == name; }))
        return;
    // 0 if the kernel's name begins with the given one; 1 for names that share nothing
    const auto unlikeness = [&](const Operation& o) {
        if (!name.empty() && o.name.starts_with(name)) return 0.0;
        return static_cast<double>(edit_distance(name, o.name)) /
               static_cast<double>(std::max(name.size(), o.name.size()));
    };
    const auto nearest = std::min_element(
        all.begin(), all.end(),
        [&](const Operation& a, const Operation& b) { return unlikeness(a) < unlikeness(b); });
    throw UsageError("there is no kernel \"", name, "\"; ",
                     unlikeness(*nearest) < 0.5
                         ? concat("the nearest is \"", nearest->name, "\", and --list shows all")
                         : "--list shows all");
}

void Comparison::read_shape() {
    if (options_.shape.empty()) return;
    std::set<char> known;
    std::string letters;
    for (const Operation* operation : chosen_)
        for (const Letter& letter : operation->letters)
            if (known.insert(letter.name).second)
                letters += concat(letters.empty() ? "" : " ", letter.name);
    std::istringstream text(options_.shape);
    for (std::string part; std::getline(text, part, ',');) {
        char letter = 0, equals = 0, rest = 0;
        int64_t extent = 0;
        std::istringstream in(part);
        const bool understood = in >> letter >> equals >> extent && equals == '=' && !(in >> rest);
        if (!understood || extent < 1 || extent > INT32_MAX)
            throw UsageError("--shape has \"", part,
                             "\" where a letter and its extent should be, such as B=8,T=256");
        if (!known.contains(letter))
            throw UsageError("--shape gives ", letter,
                             ", which no chosen kernel has; their letters are ", letters);
        for (const Operation* operation : chosen_)
            for (const Letter& its : operation->letters)
                if (its.name == letter && extent < its.least)
                    throw UsageError(operation->name, " needs ", letter, " >= ", its.least,
                                     " for its errors to have a bound; --shape gives ", extent);
        given_[letter] = extent;
    }
}

void Comparison::open_devices() {
    open_device("cpu");  // sets up its threads
    for (const Device& device : test_devices())
        if (options_.device == "all" || options_.device == (device.is_cuda() ? "cuda" : "cpu"))
            devices_.push_back(device);
    if (devices_.empty()) open_device(options_.device);  // throws, saying why
    for (const Device& device : devices_) {
        const DeviceUnderTest under_test(device);
        const bool timed = options_.repeat > 0 && !device_is_simulated();
        limits_.push_back(timed ? measure_limits(device, dtypes_) : Limits{});
    }
}

void Comparison::print_introduction() const {
    for (size_t i = 0; i < devices_.size(); ++i) {
        std::printf("- %s: %s", devices_[i].is_cuda() ? "CUDA" : "CPU",
                    device_name(devices_[i]).c_str());
        if (limits_[i].bandwidth > 0)
            std::printf("; reaches %.1f GB/s", 1e-9 * limits_[i].bandwidth);
        for (const auto& [dtype, flops] : limits_[i].flops)
            std::printf(", %.3f TFLOP/s in %s", 1e-12 * flops, name_of(dtype));
        std::printf(limits_[i].bandwidth > 0 ? "\n" : "; not timed\n");
    }
    std::printf(
        "- bound of relative L2: %s; twice that against another implementation; ✗ is beyond it\n",
        bound_formula);
    if (options_.repeat > 0)
        std::printf(
            "- ms: median of %d calls after %d that warm up, on copies of the operands that fill "
            "%zu MiB\n",
            options_.repeat, warm_up_calls, beyond_caches >> 20);
    if (options_.all)
        std::printf(
            "- errors are those at the small shapes of --list, of the result that is nearest to "
            "its bound\n");
    std::printf("\n");
}

std::vector<DType> Comparison::dtypes_of(const Operation& operation) const {
    return operation.fp32_only ? std::vector<DType>{DType::fp32} : dtypes_;
}

void Comparison::attempt(const Operation& operation, DType dtype,
                         const std::function<void()>& action) {
    try {
        action();
    } catch (const Error& error) {
        ++failures_;
        std::fflush(stdout);
        std::fprintf(stderr, "compare: %s in %s: %s\n", operation.name.c_str(), name_of(dtype),
                     error.what());
    }
}

void Comparison::judge_all(const Operation& operation, const Operands& operands,
                           const std::function<void(const Judged&)>& visit) {
    const Results exact = options_.no_reference ? Results() : operation.reference(operands);
    std::string first_name;
    Results first;  // of the first implementation, which is the CPU's if the CPU takes part
    for (const Device& device : devices_) {
        for (const Implementation& implementation : operation.implementations(operands, device)) {
            const Results results =
                Workplace(operation, operands, device, implementation).results();
            if (first_name.empty()) {
                first_name = implementation.name;
                first = results;
            }
            Judged judged{device, implementation, {}};
            if (!options_.no_reference)
                judged.judgements = judge(operands, results, "float64", exact, 1);
            const bool other_device = device.is_cuda() && !devices_.front().is_cuda();
            if (other_device || options_.no_reference)
                std::ranges::move(judge(operands, results, first_name, first, 2),
                                  std::back_inserter(judged.judgements));
            visit(judged);
        }
    }
}

std::vector<std::string> Comparison::error_cells(const Judgement& j) {
    if (!j.holds()) ++failures_;
    return {j.result,
            j.against,
            number("%.2e", j.difference.max),
            number("%.2e", j.difference.mean),
            (j.holds() ? "" : "✗ ") + number("%.2e", j.difference.relative),
            number("%.1e", j.bound)};
}

std::vector<std::string> Comparison::speed_cells(const Judged& judged, const Operation& operation,
                                                 const Operands& operands) const {
    const auto found = std::find(devices_.begin(), devices_.end(), judged.device);
    const Limits& limits = limits_[static_cast<size_t>(found - devices_.begin())];
    if (limits.bandwidth == 0) return {"–", "–", "–"};
    const Speed speed = Workplace(operation, operands, judged.device, judged.implementation,
                                  copies_beyond_caches(operands))
                            .speed(options_.repeat);
    const double by_bytes = speed.bytes / limits.bandwidth;
    const double by_flops = speed.flops > 0 ? speed.flops / limits.flops.at(operands.dtype()) : 0;
    return {number("%.4f", 1e3 * speed.seconds),
            by_flops > by_bytes ? number("%.3f TFLOP/s", 1e-12 * speed.flops / speed.seconds)
                                : number("%.1f GB/s", 1e-9 * speed.bytes / speed.seconds),
            number("%.1f %%", 100 * std::max(by_bytes, by_flops) / speed.seconds)};
}

const std::vector<Table::Column> error_columns = {
    {"result", 8},           {"against", 13},           {"max error", 9, true},
    {"mean error", 9, true}, {"relative L2", 11, true}, {"bound", 8, true}};
const std::vector<Table::Column> speed_columns = {
    {"ms", 10, true}, {"rate", 15, true}, {"of the limit", 12, true}};

template <class T>
std::vector<T> operator+(std::vector<T> a, const std::vector<T>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

void Comparison::compare(const Operation& operation) {
    Shape shape = small_shape(operation);
    for (auto& [letter, extent] : shape)
        if (given_.contains(letter)) extent = given_[letter];
    std::printf("### %s: %s\n\n%s\n\n", operation.name.c_str(), operation.computes.c_str(),
                text_of(shape, operation.letters).c_str());
    const Table table(std::vector<Table::Column>{{"dtype"}, {"implementation", 14}} +
                      error_columns + speed_columns);
    for (DType dtype : dtypes_of(operation)) {
        attempt(operation, dtype, [&] {
            Operands operands(shape, dtype, options_.seed);
            operation.declare(operands);
            judge_all(operation, operands, [&](const Judged& judged) {
                std::vector<std::string> speed = speed_cells(judged, operation, operands);
                for (const Judgement& judgement : judged.judgements) {
                    table.row(std::vector<std::string>{name_of(dtype), judged.implementation.name} +
                              error_cells(judgement) + speed);
                    speed.assign(speed_columns.size(), "");
                }
            });
        });
    }
    std::printf("\n");
}

/// Whether b is nearer to its bound than a, or further beyond it; a NaN is furthest.
bool nearer_to_bound(const Judgement& a, const Judgement& b) {
    const auto part = [](const Judgement& j) {
        return std::isnan(j.difference.relative) ? HUGE_VAL : j.difference.relative / j.bound;
    };
    return part(a) < part(b);
}

void Comparison::compare_at_gpt2_shapes() {
    const Table table(std::vector<Table::Column>{
                          {"kernel", 28}, {"dtype"}, {"implementation", 14}, {"shape", 24}} +
                      speed_columns + error_columns);
    for (const Operation* operation : chosen_) {
        for (DType dtype : dtypes_of(*operation)) {
            attempt(*operation, dtype, [&] {
                Operands small(small_shape(*operation), dtype, options_.seed);
                operation->declare(small);
                judge_all(*operation, small, [&](const Judged& judged) {
                    const auto& worst = *std::max_element(judged.judgements.begin(),
                                                          judged.judgements.end(), nearer_to_bound);
                    const Shape shape = gpt2_shape(*operation, judged.device);
                    Operands large(shape, dtype, options_.seed);
                    operation->declare(large);
                    table.row(std::vector<std::string>{operation->name, name_of(dtype),
                                                       judged.implementation.name,
                                                       text_of(shape, operation->letters)} +
                              speed_cells(judged, *operation, large) + error_cells(worst));
                });
            });
        }
    }
}

int run(int argc, char** argv) {
    Options options;
    CLI::App app(
        "Compares the implementations of the kernels: the errors of their results against float64, "
        "their time, and "
        "how\n"
        "near it is to what the device reaches at best. Without a kernel's name: all of them.",
        "compare");
    app.footer(
        "Exits with 1 when a result is NaN or its error beyond the bound that follows from its "
        "dtype and the length of "
        "its\n"
        "sums. The bound is meant for results of many elements: a single sum whose terms cancel "
        "may be less exact.\n"
        "Example: compare attention_backward --shape B=1,T=100,D=80 --dtype bf16");
    app.add_option("kernels", options.kernels, "Names from --list")->type_name("KERNEL");
    app.add_option("--shape", options.shape,
                   "Extents of letters, as --list shows them; the others keep their defaults")
        ->type_name("B=8,T=256,…");
    app.add_option("--dtype", options.dtype, "fp32, bf16 or both")
        ->check(CLI::IsMember({"fp32", "bf16", "both"}))
        ->capture_default_str();
    app.add_option("--device", options.device, "cpu, cuda or all that there are")
        ->check(CLI::IsMember({"cpu", "cuda", "all"}))
        ->capture_default_str();
    app.add_flag(
           "--all", options.all,
           "One row each at the shapes of GPT-2 124M (B=4 T=256 on the CPU, B=64 T=1024 on a GPU)")
        ->excludes("--shape");
    app.add_flag("--list", options.list,
                 "The kernels, what they compute, and the letters of their shapes");
    app.add_option("--repeat", options.repeat, "Calls that are timed; 0: none")
        ->check(CLI::Range(0, 10000))
        ->capture_default_str()
        ->type_name("N");
    app.add_option("--seed", options.seed, "Of the random operands")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str()
        ->type_name("S");
    app.add_flag("--no-reference", options.no_reference,
                 "Against the first implementation instead of float64: for large shapes");
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        std::fputs(app.help().c_str(), stdout);
        return 0;
    } catch (const CLI::ParseError& error) {
        throw UsageError(error.what(), "; see compare --help");
    }
    Comparison comparison(options);
    if (!options.list) return comparison.run();
    comparison.list();
    return 0;
}

}  // namespace
}  // namespace train_gpt::compare

int main(int argc, char** argv) {
    train_gpt::limit_openmp_spinning(argv);
    try {
        return train_gpt::compare::run(argc, argv);
    } catch (const train_gpt::UsageError& error) {
        std::fprintf(stderr, "compare: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "compare: %s\n", error.what());
    }
    return 1;
}
