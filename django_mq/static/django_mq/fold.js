// Folds the filters where they would stand before the rows: on narrow screens.
"use strict";
if (window.matchMedia("(max-width: 1024px)").matches) {
    const whole = document.querySelectorAll(".mq-filters");
    // Some themes leave out the block around them: there each filter folds by itself.
    // The keyboard reaches them where they are seen: before the rows, which they follow in the page.
    for (const each of whole) {
        each.parentElement.prepend(each);
    }
    for (const each of whole.length ? whole : document.querySelectorAll("[data-filter-title]")) {
        each.open = false;
    }
}
