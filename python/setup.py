"""The wheel holds the C library beside the package, so that it is of one platform, and of any Python 3."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class OfThePlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple:
        return "py3", "none", super().get_tag()[2]


setup(distclass=OfThePlatform, cmdclass={"bdist_wheel": AnyPython})
