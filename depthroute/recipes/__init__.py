"""Model shapes, training recipes and studies as plain functions, the papers' own among them."""

from depthroute.recipes.base import Recipe as Recipe
from depthroute.recipes.base import run_of as run_of
from depthroute.recipes.models import RECIPES as RECIPES
from depthroute.recipes.models import recipe as recipe
from depthroute.recipes.studies import baseline_study as baseline_study
from depthroute.recipes.studies import matched_study as matched_study
