"""Diagnosis of training: engine against trainer, and symptoms of a failing policy."""
