"""Data that examples train on."""
