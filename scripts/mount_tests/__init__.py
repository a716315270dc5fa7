"""Checks of a mounted braidfs, a module for each topic."""
