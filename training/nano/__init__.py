"""Nano's training data: chats with thoughts, calls and results, made from a seed and written for this project.

sums       arithmetic in figures and words       worked     one step of it in lines of fixed shape
stories    word problems                         roles frames measures lexicon    what they are made of
errands    calls of tools                        toolbox subjects                 tools and what they know
copying    drills in it
notes      long contexts                         talk       itself, manners, other subjects
chats      all of it as chats                    heldout    what training never sees
"""

from training.nano.chats import KINDS, WISHES, drill, sample

__all__ = ["KINDS", "WISHES", "drill", "sample"]
