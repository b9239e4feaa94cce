#include "training/supervise/supervise.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "base/stopwatch.h"
#include "parallel/world.h"
#include "training/files/checkpoint.h"
#include "training/files/history_chain.h"
#include "training/interrupt.h"
#include "training/supervise/host_checks.h"
#include "training/supervise/start_ranks.h"
#include "training/supervise/supervisor_log.h"

namespace train_gpt {

namespace {

namespace fs = std::filesystem;

/// The step of the newest checkpoint; −1 if there is none.
int64_t newest_checkpoint(const fs::path& run_dir) {
    const std::vector<fs::path> checkpoints = list_checkpoints(run_dir);
    return checkpoints.empty() ? -1 : checkpoint_step(checkpoints.front());
}

uintmax_t history_bytes(const fs::path& run_dir) {
    std::error_code code;
    const uintmax_t bytes = fs::file_size(run_dir / history_file, code);
    return code ? 0 : bytes;
}

class Supervisor {
  public:
    explicit Supervisor(const SupervisedJob& job)
        : job_(job),
          config_(job.config(ranks_of(job))),
          run_dir_(config_.run_dir),
          log_((make_directory(run_dir_), run_dir_)),
          starter_(job, config_, log_),
          checks_(job, config_, starter_, log_),
          wanted_(ranks_of(job)) {}

    int run() {
        const auto end = [&](int code, const std::string& why) {
            log_.record("supervisor_end", concat("ended with exit code ", code, why),
                        {{"code", code}});
            return code;
        };
        try {
            return end(run_to_end(), "");
        } catch (const Error& error) {
            end(1, concat(": ", error.what()));
            throw ReportedError(error.what());
        }
    }

  private:
    static int ranks_of(const SupervisedJob& job) {
        int ranks = 0;
        for (size_t i = 0; i + static_cast<size_t>(job.options.spares) < job.hosts.size(); ++i)
            ranks += job.hosts[i].slots;
        return ranks;
    }

    int run_to_end() {
        for (int start = 1;; ++start) {
            const int64_t before = newest_checkpoint(run_dir_);
            const std::vector<HostRanks> ranks = checks_.next_ranks(wanted_);
            Verdict verdict{.kind = Verdict::Kind::lost, .code = 1};
            if (!interrupted() && !ranks.empty()) verdict = train(start, ranks, before);
            if (interrupted() && ranks.empty()) verdict = stopped();
            // Ranks get another signal than the supervisor.
            if (verdict.kind == Verdict::Kind::done)
                return verdict.code == 75 && interrupted() ? stopped_code() : verdict.code;
            if (verdict.kind == Verdict::Kind::hopeless) return give_up(verdict);
            if (interrupted()) return end_without(verdict);
            if (newest_checkpoint(run_dir_) > before) {
                without_progress_ = 0;
                last_failure_ = {};
                last_hosts_.clear();
            }
            if (!ranks.empty() && !learn_from(verdict, ranks)) return give_up(verdict);
            if (++without_progress_ > job_.options.max_restarts) return give_up_after_many();
            const double seconds = backoff_seconds(without_progress_, job_.options.backoff);
            log_.say(concat("starts the ranks again",
                            seconds > 0 ? concat(" in ", seconds, " s") : std::string()));
            wait(seconds);
            if (interrupted()) return stopped_code();
        }
    }

    Verdict train(int start, const std::vector<HostRanks>& ranks, int64_t checkpoint) {
        const int world = ranks.back().first + ranks.back().count;
        Json names = Json::array();
        std::string text;
        for (const HostRanks& part : ranks) {
            names.push_back(job_.hosts[part.host].name);
            text +=
                concat(text.empty() ? "" : ", ", job_.hosts[part.host].name, " (", part.count, ")");
        }
        log_.record(
            "ranks_start",
            concat("start ", start, ": ", world, world == 1 ? " rank" : " ranks", " on ", text,
                   checkpoint >= 0 ? concat(", from the checkpoint of step ", checkpoint)
                                   : std::string()),
            {{"start", start}, {"ranks", world}, {"hosts", names}, {"checkpoint", checkpoint}});
        const uintmax_t history = history_bytes(run_dir_);
        const Verdict verdict = starter_.train(ranks, start);
        has_begun_ |= history_bytes(run_dir_) != history;  // before record() adds to it
        constexpr const char* kinds[] = {"done", "lost", "blocked", "failed", "hopeless"};
        constexpr const char* texts[] = {"the ranks have ended", "ranks were lost",
                                         "the ranks could not start", "the ranks have failed",
                                         "the ranks have failed"};
        const auto kind = static_cast<size_t>(verdict.kind);
        std::string said = verdict.line.empty() ? "" : ": " + verdict.line;
        if (said.empty() && !verdict.ranks.empty())
            said = concat(": the connection to ",
                          job_.hosts[host_of(verdict.ranks.front(), ranks)].name, " has ended");
        log_.record("ranks_end", concat(texts[kind], " (exit code ", verdict.code, ")", said),
                    {{"kind", kinds[kind]}, {"code", verdict.code}, {"line", verdict.line}});
        return verdict;
    }

    static size_t host_of(int rank, const std::vector<HostRanks>& ranks) {
        for (const HostRanks& part : ranks)
            if (rank >= part.first && rank < part.first + part.count) return part.host;
        return ranks.front().host;
    }

    /// What two failures one after the other, without a checkpoint between them, have in common.
    /// Returns false if another start would fail as well. So would a run that has never got as far
    /// as its history, since that is mostly an error in its configuration or its data.
    bool learn_from(const Verdict& verdict, const std::vector<HostRanks>& ranks) {
        if (verdict.kind != Verdict::Kind::lost && !has_begun_) return false;
        std::vector<size_t> hosts;
        for (const int rank : verdict.ranks) hosts.push_back(host_of(rank, ranks));
        const bool same_error = verdict.kind == Verdict::Kind::failed &&
                                is_same_error(last_failure_.line, verdict.line);
        bool dropped = false;
        for (const size_t host : hosts)
            if (ranks.size() > 1 && std::ranges::find(last_hosts_, host) != last_hosts_.end())
                dropped |= checks_.avoid(host, "ranks on it were the first to fail twice");
        last_failure_ = verdict;
        last_hosts_ = hosts;
        return !same_error || dropped;
    }

    /// Waits, unless a signal comes.
    static void wait(double seconds) {
        const Stopwatch since;
        while (!interrupted() && since.seconds() < seconds) ::usleep(50'000);
    }

    static int stopped_code() { return stopped_early_code(interrupt_signal() == SIGINT); }
    Verdict stopped() {
        log_.say(concat(interrupted(), ": no ranks run; the same command continues"));
        return {.code = stopped_code()};
    }
    int end_without(const Verdict& verdict) {
        log_.say(concat("the ranks have failed after ", interrupted(),
                        "; the same command resumes from the newest checkpoint"));
        return verdict.code;
    }
    int give_up(const Verdict& verdict) {
        log_.say(concat("does not start the ranks again, since they would fail again",
                        verdict.line.empty() ? "" : ": " + verdict.line));
        return verdict.code;
    }
    int give_up_after_many() {
        log_.say(concat("does not start the ranks again: ", job_.options.max_restarts,
                        " restarts have brought no new checkpoint (--max-restarts)"));
        return 1;
    }

    const SupervisedJob& job_;
    const Config config_;
    const fs::path run_dir_;
    SupervisorLog log_;
    RankStarter starter_;
    HostChecks checks_;
    const int wanted_;
    bool has_begun_ = false;  // some start has
    int without_progress_ = 0;
    Verdict last_failure_;
    std::vector<size_t> last_hosts_;
};

}  // namespace

int supervise(const SupervisedJob& job) { return Supervisor(job).run(); }

}  // namespace train_gpt
