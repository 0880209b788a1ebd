"""The lowest package: it imports nothing else of ours, and all packages import it.

`checks` validates arguments and the results of users' functions. `types` has aliases
for annotations. `trees` has operations on pytrees with typed keys, `prng` generates
random numbers, and `jaxprs` reads traced functions. `programs` shares compiled
programs between equal objects. `files` writes files that a killed process leaves whole,
and `hyperparameters` is the base class of configs. `names` has the hints for wrong
names. `platform` chooses implementations by device, and `convolution` is a convolution
for networks.
"""
