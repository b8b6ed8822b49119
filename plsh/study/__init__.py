"""The claims of the paper as runs that can fail: theorem 2.1, theorem 2.2, and training.

`plsh study` on the command line; the extra ``study`` brings torch, matplotlib and tqdm, which the
modules here import where they need them.
"""
