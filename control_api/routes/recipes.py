"""/v1/recipes: run definitions that ship with Slipstream, to start from."""

from fastapi import APIRouter

import recipes
from control_api.routes.responses import refusals
from control_api.schemas import RecipeList, RecipePublic

router = APIRouter(prefix="/v1/recipes", tags=["recipes"])


@router.get("", operation_id="list_recipes", responses=refusals(has_body=False))
def list_recipes() -> RecipeList:
    """All of them; they are few."""
    return RecipeList(recipes=[_read(name) for name in recipes.recipe_names()])


def _read(name: str) -> RecipePublic:
    text = recipes.recipe_path(name).read_text(encoding="utf-8")
    return RecipePublic(name=name, summary=text.partition("\n")[0].removeprefix("#").strip(), text=text)
