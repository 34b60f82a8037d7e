// Folds the filters where they would stand before the rows: on narrow screens.
"use strict";
{
    const filters = document.querySelector(".mq-filters");
    if (filters && window.matchMedia("(max-width: 1024px)").matches) {
        filters.open = false;
    }
}
