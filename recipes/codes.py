"""What each code of a refusal or warning means, and what to do: tables of the reference.

A refusal's own line says more: what was found, where, and what was expected.
"""

from __future__ import annotations

REFUSALS = {
    "E-BANK": (
        "The bank of LoRAs is too small, or one of its LoRAs does nothing or does not fit.",
        "Remove or replace the LoRAs that are named, or add others.",
    ),
    "E-BASE": (
        "What was saved, or is to be taken back, belongs to another base.",
        "Load the base that it was trained on, unchanged.",
    ),
    "E-BOOK": (
        "A page or figure of the book cannot be made, or is not there yet.",
        "Run the command in the line, or mend the page or figure.",
    ),
    "E-BUDGET": (
        "A judged evaluation would cost more than its budget.",
        "Raise the budget, or leave it out; grades that are paid for are kept.",
    ),
    "E-CELL": (
        "A cell of a notebook ended with an error of its own.",
        "Mend the cell, which the line names.",
    ),
    "E-CHOICE": (
        "An option has no such value, or two options do not go together.",
        "Take a value that the line lists.",
    ),
    "E-CLAIM": (
        "A claim was changed after the runs that decide it.",
        "Bring the old claim back, and give the new one an id of its own.",
    ),
    "E-CLUSTER": (
        "No Ray cluster answers, or it has too little for one job.",
        "Start a cluster, mend its address, or ask for less a job.",
    ),
    "E-COMPARE": (
        "The book's own run cannot be compared with itself.",
        "Give a run of yours.",
    ),
    "E-CONFIG": (
        "A settings file cannot be read, or holds a wrong value.",
        "Mend the file at the place that is named.",
    ),
    "E-CONFIGDIFF": (
        "The folder holds checkpoints of another run.",
        "Name a new folder, or set what differs as it was.",
    ),
    "E-DATA": (
        "Rows, texts or tables lack something, repeat it or contradict each other.",
        "Mend the row or field that is named.",
    ),
    "E-DEP": (
        "A package or program that this needs is not installed.",
        "Install it by the command in the line.",
    ),
    "E-DEVICE": (
        "The device is not there, or tensors lie on different ones.",
        "Take `cpu`, or move what is named.",
    ),
    "E-DISK": (
        "The disk is full or fails.",
        "Make room, or take another disk.",
    ),
    "E-DTYPE": (
        "Numbers have another precision or type than is needed.",
        "Cast what is named, or load the base in `float32`.",
    ),
    "E-EXISTS": (
        "What is to be written exists already.",
        "Choose another folder, or remove the old one.",
    ),
    "E-FORM": (
        "No export format can hold the model exactly.",
        "Take another format, or keep our checkpoint.",
    ),
    "E-FORMAT": (
        "A file is damaged, or not in the format that its name says.",
        "Fetch or write it again, or mend the line that is named.",
    ),
    "E-GIT": (
        "This needs git, its history or a commit.",
        "Work in a full clone, and commit first.",
    ),
    "E-GRADIENT": (
        "A gradient is needed and would be missing or wrong.",
        "Run without `no_grad`, or freeze what needs none.",
    ),
    "E-HASH": (
        "A file was changed since its hash was noted.",
        "Fetch or make it again.",
    ),
    "E-IMPL": (
        "An operation has no such implementation here.",
        "Take `impl='auto'`.",
    ),
    "E-INTERNAL": (
        "moebook failed: a fault of ours.",
        "Report it as the line says.",
    ),
    "E-JUDGE": (
        "The model that judges does not answer, or not as asked.",
        "Look at its address and key, or take another model.",
    ),
    "E-KERNEL": (
        "The process that ran a notebook has ended.",
        "Run it again; look for a lack of memory first.",
    ),
    "E-KEYS": (
        "Names do not fit: of weights, layers, columns or experts.",
        "Give exactly what the line lists.",
    ),
    "E-KSHOT": (
        "Rocket has too few annotated rows, or one is too long.",
        "Give more rows or shorter ones, or lower K.",
    ),
    "E-LEAK": (
        "Rows of the test are among those of the training.",
        "Remove them from one of the two.",
    ),
    "E-LIMIT": (
        "A file is larger than what is read.",
        "Split it, or look whether it is the right one.",
    ),
    "E-LOCKED": (
        "Another process works on the same file or folder.",
        "Wait until it has ended.",
    ),
    "E-MANIFEST": (
        "A checkpoint's list of files is missing or was changed.",
        "Fetch or save the checkpoint again.",
    ),
    "E-MEMORY": (
        "Memory ran out, or would.",
        "Close other programs, or take a smaller base, batch or number of jobs.",
    ),
    "E-MODEL": (
        "The model is not of a kind that this method or operation takes.",
        "Take another base, or prepare this one as the line says.",
    ),
    "E-NAME": (
        "Nothing has this name, or two things have one name.",
        "Take a name that the line lists.",
    ),
    "E-NOFILE": (
        "A file or folder is not there.",
        "Mend the path, or fetch what is missing.",
    ),
    "E-NONFINITE": (
        "Numbers hold NaN or infinity.",
        "Lower the rate, or find where they come from.",
    ),
    "E-NOTEBOOK": (
        "No such notebook, or it is not written as one of the book.",
        "Take a name that the line lists, or mend the cell.",
    ),
    "E-OFFLINE": (
        "What is needed lies on the hub, and there is no connection.",
        "Connect once, or give a folder that holds it.",
    ),
    "E-OS": (
        "The system refuses a file or folder for another reason.",
        "Look at the reason in the line.",
    ),
    "E-OUTPUT": (
        "An executed notebook holds an error, or cells out of their order.",
        "Restart its kernel and run all cells.",
    ),
    "E-PARAMETER": (
        "A parameter is unknown, unset, or was changed where it may not be.",
        "Set it in the parameters cell or with `-p`.",
    ),
    "E-PATH": (
        "A path is no place for this: a file, a link, too long, or outside a checkout.",
        "Give a plain file or folder, as the line says.",
    ),
    "E-PEER": (
        "A library to compare with is not installed.",
        "Install it, or leave it out of the benchmark.",
    ),
    "E-PERM": (
        "You may not read or write there.",
        "Change its permissions, or take another folder.",
    ),
    "E-PICKLE": (
        "Weights are in a format that can run code.",
        "Save them as safetensors.",
    ),
    "E-PIN": (
        "A model or data set is named without the commit that fixes it.",
        "Give all 40 hex digits of a commit.",
    ),
    "E-POOL": (
        "Runs that are pooled do not belong together, or a pool lacks a value.",
        "Move the run to its own pool, or run what is missing.",
    ),
    "E-PORT": (
        "The port is taken or not allowed.",
        "Give another one.",
    ),
    "E-PROCESS": (
        "Another process of a shared training has ended.",
        "Read its output and start all again.",
    ),
    "E-PROSE": (
        "A sentence of the findings names no value, or one that says otherwise.",
        "Mend the sentence that is named.",
    ),
    "E-PROTOCOL": (
        "No such protocol, or its file is not one.",
        "Take a name that the line lists.",
    ),
    "E-RANGE": (
        "A number is too small or too large, or a list too short or too long.",
        "Give one in the range that the line names.",
    ),
    "E-REMOTECODE": (
        "A model or data set would bring code of its own to run.",
        "Take another one, or a commit that holds data alone.",
    ),
    "E-RUN": (
        "A run's file is damaged, altered, incomplete or of a newer moebook.",
        "Run it again, or update moebook.",
    ),
    "E-SANDBOX": (
        "Written programs cannot be run safely here.",
        "Install the sandbox, or choose tasks that run none.",
    ),
    "E-SECRET": (
        "A password or key would be stored or published.",
        "Take it out; give it by an environment variable.",
    ),
    "E-SHAPE": (
        "A tensor or table has another shape than is expected.",
        "Bring it to the shape in the line.",
    ),
    "E-SHARD": (
        "A part of a large table is missing, changed or has other columns.",
        "Bring it back as it was, or mend its columns.",
    ),
    "E-TIER": (
        "No such tier, or it keeps no pool.",
        "Take one that the line lists.",
    ),
    "E-TIMEOUT": (
        "A cell took longer than it may.",
        "Raise the limit, or take a smaller tier.",
    ),
    "E-TIMES": (
        "Times cannot be measured: the machine is busy, or a command failed.",
        "Wait until it is idle, or mend the command.",
    ),
    "E-TYPE": (
        "A value is of another type than is expected.",
        "Give the type in the line.",
    ),
    "E-USAGE": (
        "A command or function was called with options that it does not take so.",
        "Call it as the line says; `--help` lists the options.",
    ),
    "E-VALUE": (
        "A recorded value has a wrong name, unit or mean, or stands twice.",
        "Record it once, in a known unit.",
    ),
    "E-VERDICT": (
        "A recorded value has another unit than its claim.",
        "Record it in the claim's unit.",
    ),
    "E-VOCAB": (
        "Token ids and the model's vocabulary do not fit.",
        "Take the model's own tokenizer.",
    ),
}
WARNINGS = {
    "W-BASE": (
        "LoRAs do not say which base they belong to; they fit this one by their shapes.",
        "Make sure that they were trained on it.",
    ),
    "W-CODE": (
        "Some programs of a benchmark were neither right nor wrong, for the reason given.",
        "Mend that reason; it is no fault of the model.",
    ),
    "W-FIGURE": (
        "Something in a figure cannot be read.",
        "Mend the figure; a build of the book stops there.",
    ),
    "W-IDLE": (
        "Parameters were changed that have no effect in this run.",
        "Leave them, or change what they depend on.",
    ),
    "W-LONG": (
        "Prompts or rows are longer than the model takes; they were cut or left out.",
        "Shorten them, or take a model that reads more.",
    ),
    "W-NONFINITE": (
        "A LoRA has no finite perplexity, and was left out.",
        "Train it again, or remove it.",
    ),
    "W-PICKLE": (
        "A file that can run code was passed over for the safe one beside it.",
        "Nothing; you may delete it.",
    ),
    "W-REPRO": (
        "A checkpoint comes from another torch, or number of threads or processes.",
        "Nothing; only the rounding may differ.",
    ),
    "W-ROUTER": (
        "The loss of the language model never reaches the routers.",
        "Take `top_k=2`; after upcycling add `noise`.",
    ),
}
