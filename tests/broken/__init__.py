"""Strategies that are right, and strategies with one mistake each, for tests of the conformance kit.

`catalogue.MISTAKES` holds all of them once the modules that add to it are imported; `catalogue.mistakes` does so. This
package itself is torch-free, as the module of a strategy's plan must be.
"""
