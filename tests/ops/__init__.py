"""Tests of the kernels: everything here imports the folder ``ops`` beside ``tests``, installed or not."""
