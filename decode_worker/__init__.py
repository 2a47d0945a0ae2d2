"""The decode worker: model, QSAC, decode loop, Ray actors. The only package that imports torch and ray."""
