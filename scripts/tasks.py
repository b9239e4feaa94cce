#!/usr/bin/env python3
"""Turns published data sets into tasks for `train_gpt eval --tasks` and evaluation.tasks
(docs/evaluations.md).

    scripts/tasks.py NAME FILE FOLDER

NAME is core, arc, piqa, hellaswag, openbookqa, winogrande, sciq, boolq, commonsenseqa, mmlu or
lambada; FILE is what was published (scripts/data.sh NAME downloads it and calls this script); the
tasks are written into FOLDER. Needs Python 3.8 and nothing else.

`core` has the items of nanochat's evaluation bundle and follows its procedure. All others are asked
as lm-evaluation-harness asks them (version 0.4.13): the same text before the same choices. MMLU's
questions come after the five examples of their subject, as letters (mmlu.jsonl) and with the
choices' texts (mmlu_cloze.jsonl).
"""
import csv
import io
import json
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

# Name: (shots, form, delimiter, baseline in percent by the table of September 2025, which train_gpt
# calls v2)
MC, SCHEMA, LM, ANSWER = "multiple_choice", "schema", "language_modeling", "\nAnswer: "
CORE = {
    "hellaswag_zeroshot": (0, MC, " ", 25),
    "jeopardy": (10, LM, ANSWER, 0),
    "bigbench_qa_wikidata": (10, LM, " ", 0),
    "arc_easy": (10, MC, ANSWER, 25),
    "arc_challenge": (10, MC, ANSWER, 25),
    "copa": (0, MC, " ", 50),
    "commonsense_qa": (10, MC, " ", 40.3),
    "piqa": (10, MC, ANSWER, 50),
    "openbook_qa": (0, MC, " ", 25),
    "lambada_openai": (0, LM, " ", 0),
    "hellaswag": (10, MC, " ", 25),
    "winograd": (0, SCHEMA, " ", 50),
    "winogrande": (0, SCHEMA, " ", 50),
    "bigbench_dyck_languages": (10, LM, " ", 0),
    "agi_eval_lsat_ar": (3, MC, " ", 25),
    "bigbench_cs_algorithms": (10, LM, " ", 0),
    "bigbench_operators": (10, LM, " ", 0),
    "bigbench_repeat_copy_logic": (10, LM, " ", 0),
    "squad": (10, LM, " ", 0),
    "coqa": (0, LM, " ", 0),
    "boolq": (10, MC, ANSWER, 62),
    "bigbench_language_identification": (10, MC, " ", 25),
}
FIELDS = {MC: ("query", "choices", "gold"), SCHEMA: ("context_options", "continuation", "gold"),
          LM: ("context", "continuation")}


def stop(message):
    sys.exit(f"error: {message}")


class Published:
    """A published file, and the files in it if it is an archive."""

    def __init__(self, path):
        self.path = Path(path)
        try:
            self.members = self.open_archive()
        except OSError as error:
            stop(f"{path} cannot be read: {error.strerror}")
        except (zipfile.BadZipFile, tarfile.TarError) as error:
            stop(f"{path} is not the archive that was published ({error}); remove it and run the "
                 "same command again")

    def open_archive(self):
        if self.path.suffix == ".zip":
            archive = zipfile.ZipFile(self.path)
            return {name: lambda name=name: archive.read(name) for name in archive.namelist()}
        if self.path.suffix == ".tar":
            archive = tarfile.open(self.path)
            return {member.name: lambda member=member: archive.extractfile(member).read()
                    for member in archive.getmembers() if member.isfile()}
        return {self.path.name: self.path.read_bytes}

    def named(self, ending):
        """The names of files with this ending; not what macOS adds to archives."""
        return sorted(name for name in self.members
                      if name.endswith(ending) and "__MACOSX" not in name)

    def text(self, ending):
        names = self.named(ending)
        if not names:
            stop(f"{self.path} has no {ending}; it is not what was published")
        return self.members[names[0]]().decode("utf-8")

    def lines(self, ending):
        """The JSON objects of a file's lines."""
        objects = []
        for number, line in enumerate(self.text(ending).split("\n"), 1):
            if line.strip():
                try:
                    objects.append(json.loads(line))
                except ValueError as error:
                    stop(f"{self.path}: line {number} of {ending} is not JSON ({error})")
        return objects


def write(folder, name, items, **header):
    """A task appears when it is complete. Those that CORE asks otherwise under the same name get
    another name than CORE's."""
    task = f"{name}_harness" if header["procedure"] == "harness" and name in CORE else name
    path, part = Path(folder) / f"{name}.jsonl", Path(folder) / f"{name}.jsonl.part"
    with open(part, "w", encoding="utf-8") as file:
        for line in ({"task": task, **header}, *items):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(part, path)
    print(f"{path}: {len(items)} items")


def choices(query, texts, gold):
    return {"query": query, "choices": texts, "gold": gold}


def write_choices(folder, name, items, baseline):
    write(folder, name, items, form=MC, procedure="harness", baseline=baseline)


# ---- nanochat's bundle ---------------------------------------------------------------------------

def core(published, folder):
    """core.yaml says where each task's items are, and how they are asked; only these plain fields
    of it are read."""
    entries = {}
    for entry in (
            re.split(r"^\s*-(?=\s*(?:\n\s*)?label:)", published.text("core.yaml"), flags=re.M)[1:]):
        field = {key: value.split(" #")[0].strip()
                 for key, value in re.findall(r"^\s*(\w+):[ \t]*(.*)$", entry, flags=re.M)}
        entries[field["label"].strip("'\"")] = field
    missing = [name for name in CORE if name not in entries]
    if missing:
        stop(f"{published.path}: core.yaml lacks {', '.join(missing)}; this is not the bundle that "
             "CORE is computed from")
    for name, (shots, form, delimiter, baseline) in CORE.items():
        entry = entries[name]
        given = {
            "shots": int(re.search(r"\d+", entry.get("num_fewshot") or str(shots)).group()),
            "form": entry.get("icl_task_type", form),
            "delimiter": unquoted(entry["continuation_delimiter"])
                         if "continuation_delimiter" in entry else " "}
        if given != {"shots": shots, "form": form, "delimiter": delimiter}:
            print(f"note: {name} is asked otherwise in this bundle than it was: {given}",
                  file=sys.stderr)
        if given["form"] not in FIELDS:
            stop(f"{published.path}: core.yaml gives {name} the form {given['form']}, which "
                 "train_gpt does not know")
        items = [{key: item[key] for key in FIELDS[given["form"]]} for item in
                 published.lines("eval_data/" + entry["dataset_uri"].strip("'\""))]
        write(folder, name, items, form=given["form"], procedure="core", shots=given["shots"],
              delimiter=given["delimiter"], baseline=baseline)


def unquoted(text):
    """A scalar of YAML."""
    if text.startswith('"'):
        return json.loads(text[:text.rindex('"') + 1])
    return text[1:text.rindex("'")].replace("''", "'") if text.startswith("'") else text


# ---- As lm-evaluation-harness asks ---------------------------------------------------------------

def by_label(question):
    """The choices' texts, and which is right, of the form that ARC, OpenBookQA and CommonsenseQA
    share."""
    options = question["question"]["choices"]
    return ([option["text"] for option in options],
            [option["label"] for option in options].index(question["answerKey"].strip()))


def arc(published, folder):
    for name, file in (("arc_easy", "ARC-Easy-Test.jsonl"),
                       ("arc_challenge", "ARC-Challenge-Test.jsonl")):
        write_choices(folder, name,
                      [choices(f"Question: {q['question']['stem']}\nAnswer:", *by_label(q))
                       for q in published.lines(file)], 25)


def openbookqa(published, folder):
    write_choices(folder, "openbookqa", [choices(q["question"]["stem"], *by_label(q))
                                         for q in published.lines("Main/test.jsonl")], 25)


def commonsenseqa(published, folder):
    items = []
    for q in published.lines("dev_rand_split.jsonl"):
        texts, gold = by_label(q)
        listed = "".join(f"\n{letter}. {text}" for letter, text in zip("ABCDE", texts))
        items.append(choices(f"Question: {q['question']['stem'].strip()}{listed}\nAnswer:",
                             list("ABCDE"), gold))
    write_choices(folder, "commonsenseqa", items, 20)


def piqa(published, folder):
    labels = [int(label) for label in published.text("dev-labels.lst").split()]
    questions = published.lines("dev.jsonl")
    if len(labels) != len(questions):
        stop(f"{published.path}: there are {len(questions)} questions and {len(labels)} labels")
    write_choices(folder, "piqa",
                  [choices(f"Question: {q['goal']}\nAnswer:", [q["sol1"], q["sol2"]], label)
                   for q, label in zip(questions, labels)], 50)


def hellaswag(published, folder):
    def cleaned(text):
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    write_choices(folder, "hellaswag", [
        choices(cleaned(f"{q['activity_label']}: {q['ctx_a']} {q['ctx_b'].capitalize()}"),
                [cleaned(e) for e in q["endings"]], int(q["label"]))
        for q in published.lines("hellaswag_val.jsonl")], 25)


def winogrande(published, folder):
    items = []
    for q in published.lines("winogrande_1.1/dev.jsonl"):
        at = q["sentence"].index("_")
        items.append({"context_options": [q["sentence"][:at] + q[option]
                                          for option in ("option1", "option2")],
                      "continuation": q["sentence"][at + 1:].strip(), "gold": int(q["answer"]) - 1})
    write(folder, "winogrande", items, form=SCHEMA, procedure="harness", baseline=50)


def sciq(published, folder):
    write_choices(folder, "sciq", [
        choices(f"{q['support'].lstrip()}\nQuestion: {q['question']}\nAnswer:",
                [q["distractor1"], q["distractor2"], q["distractor3"], q["correct_answer"]], 3)
        for q in json.loads(published.text("test.json"))], 25)


def boolq(published, folder):
    write_choices(folder, "boolq", [choices(f"{q['passage']}\nQuestion: {q['question']}?\nAnswer:",
                                            ["no", "yes"], int(q["label"]))
                                    for q in published.lines("val.jsonl")], 62)


def lambada(published, folder):
    items = []
    for line in published.lines("lambada_test.jsonl"):
        words = line["text"].split(" ")
        items.append({"context": " ".join(words[:-1]), "continuation": words[-1]})
    write(folder, "lambada_openai", items, form=LM, procedure="harness", baseline=0)


def mmlu(published, folder):
    letters, cloze = [], []
    for name in published.named("_test.csv"):
        subject = Path(name).name[:-len("_test.csv")]
        about = ("The following are multiple choice questions (with answers) about "
                 f"{subject.replace('_', ' ')}.\n\n")
        rows, examples = ([(row[0].strip(), row[1:5], "ABCD".index(row[5]))
                           for row in csv.reader(io.StringIO(published.text(file)))]
                          for file in (f"test/{subject}_test.csv", f"dev/{subject}_dev.csv"))

        def lettered(question, texts):
            return question + "".join(f"\n{letter}. {text}"
                                      for letter, text in zip("ABCD", texts)) + "\nAnswer:"

        before = about + "".join(f"{lettered(q, texts)} {'ABCD'[gold]}\n\n"
                                 for q, texts, gold in examples[:5])
        letters += [choices(before + lettered(q, texts), list("ABCD"), gold)
                    for q, texts, gold in rows]
        before = about.replace("multiple choice ", "") + "".join(
            f"Question: {q}\nAnswer: {texts[gold]}\n\n" for q, texts, gold in examples[:5])
        cloze += [choices(f"{before}Question: {q}\nAnswer:", texts, gold)
                  for q, texts, gold in rows]
    if not letters:
        stop(f"{published.path} has no questions; it is not what was published")
    write_choices(folder, "mmlu", letters, 25)
    write_choices(folder, "mmlu_cloze", cloze, 25)


CONVERTERS = {f.__name__: f for f in (core, arc, piqa, hellaswag, openbookqa, winogrande, sciq,
                                      boolq, commonsenseqa, mmlu, lambada)}


def main():
    if sys.argv[1:] == ["--help"]:
        return print(__doc__)
    if len(sys.argv) != 4 or sys.argv[1] not in CONVERTERS:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    name, file, folder = sys.argv[1:]
    published = Published(file)
    try:
        CONVERTERS[name](published, folder)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        stop(f"{file} does not have the form in which {name} was published: {type(error).__name__} "
             f"{error}")
    return None


if __name__ == "__main__":
    main()
